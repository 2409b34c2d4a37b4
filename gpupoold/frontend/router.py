"""The ASGI application of a frontend: routes a request to its model's API.

Only the paths named here are served. The applications behind also register operator endpoints
(scaling, profiling, raw metrics), which stay out of reach.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from gpupoold import __version__
from gpupoold.checkpoints.peers import PATH as CHECKPOINTS_PATH
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import with_defaults
from gpupoold.frontend.batches.api import BATCHES, FILES
from gpupoold.frontend.batches.exchange import Exchange
from gpupoold.frontend.batches.service import BatchService
from gpupoold.frontend.batches.work import JsonAnswer
from gpupoold.frontend.body import Disconnected, read_body, replay
from gpupoold.frontend.callers import Caller, Callers, serving, without_credentials
from gpupoold.frontend.catalog import Catalog, model_row
from gpupoold.frontend.checkpoint_files import CheckpointFiles
from gpupoold.frontend.errors import (
    ApiError,
    method_not_allowed,
    no_such_path,
    no_such_response,
    not_of_this_kind,
    send_error,
    send_json,
)
from gpupoold.frontend.fleet_calls import FleetCall, FleetCalls, continuing
from gpupoold.frontend.gates import Gates
from gpupoold.frontend.image_bounds import NUM_DECODING, bounding_images
from gpupoold.frontend.in_flight import BodyHolding, BytesInFlight
from gpupoold.frontend.metrics import METRICS_PATH, MetricsCalls
from gpupoold.frontend.model_lookup import Hold, ModelLookup
from gpupoold.frontend.mounts import Mount, Mounts, Receive, Scope, Send
from gpupoold.frontend.openapi import describe
from gpupoold.frontend.origins import check_origin
from gpupoold.frontend.pacing import pacing, wanted_gap_s
from gpupoold.frontend.pooling_bodies import POOLING_PATHS
from gpupoold.frontend.prompt_bounds import counting_prompts
from gpupoold.frontend.request_head import check_num_requests, read_head
from gpupoold.frontend.request_ids import RequestIds, naming, sending_id, with_id
from gpupoold.frontend.traces import TracedRequest, Traces
from gpupoold.frontend.waiting import wants_comments

logger = logging.getLogger(__name__)

ROUTED_PATHS = POOLING_PATHS | frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
    }
)
# Paths for load balancers and service managers, which have no key; the answers name no model.
_OPEN_PATHS = frozenset({"/health", "/ready"})
_RESPONSES_PREFIX = "/v1/responses/"
_MODELS_PREFIX = "/v1/models/"
_OPENAPI_PATH = "/openapi.json"


@dataclass(slots=True)
class Bounds:
    """Limits of live requests and bytes; may change at any time.

    ``max_live_requests`` is per model, ``in_flight`` for this process.
    """

    max_body_bytes: int
    max_live_requests: int
    in_flight: BytesInFlight
    hold: Hold = field(default_factory=Hold)


class Router:
    """Routes requests by ``model``; answers requests without a model itself."""

    def __init__(
        self,
        catalog: Catalog,
        mounts: Mounts,
        gates: Gates,
        metrics: MetricsCalls,
        callers: Callers,
        bounds: Bounds,
        traces: Traces | None = None,
        batches: BatchService | None = None,
        fleet_calls: FleetCalls | None = None,
    ) -> None:
        self._catalog = catalog
        self._mounts = mounts
        self._gates = gates
        self._callers = callers
        self._bounds = bounds
        self._lookup = ModelLookup(catalog, mounts, bounds.hold)
        self._metrics = metrics
        self._traces = traces or Traces("")
        self._batches = batches
        self._fleet_calls = fleet_calls or FleetCalls()
        self._checkpoint_files = CheckpointFiles(self._fleet_calls)
        self._decoding = asyncio.Semaphore(NUM_DECODING)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point; never raises because of a request."""
        ids = RequestIds()
        send = sending_id(send, ids)
        try:
            await self._dispatch(scope, receive, send, ids)
        except Disconnected:
            pass
        except ApiError as error:
            anthropic = scope["path"].startswith("/v1/messages")
            await send_error(send, error, anthropic=anthropic)
        except Exception:
            # The model's API has answered 500, or else the server does.
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send, ids: RequestIds) -> None:
        path, method = scope["path"], scope["method"]
        if path.startswith(CHECKPOINTS_PATH):
            await self._checkpoint_files.serve(scope, receive, send)
            return
        is_open = path in _OPEN_PATHS
        caller = Caller() if is_open else self._callers.identify(scope["headers"])
        if caller.key is None and not is_open and not _is_unix(scope):
            check_origin(scope["headers"], self._callers.host_names)
        if path == "/metrics":
            caller.check_metrics()
        if path in ROUTED_PATHS:
            if method != "POST":
                raise method_not_allowed(method, path)
            fleet_call = self._fleet_calls.find(scope)
            await self._callers.begin(caller)
            with self._traces.request(scope, ids.http_id) as traced:
                scope = without_credentials(scope)
                await self._route_by_model(caller, scope, receive, send, ids, traced, fleet_call)
        elif path.startswith(_RESPONSES_PREFIX):
            await self._callers.begin(caller)
            await self._route_by_response(caller, without_credentials(scope), receive, send)
        elif self._batches is not None and _is_batch_path(path):
            await self._callers.begin(caller)
            await self._batches.serve(caller, without_credentials(scope), receive, send)
        elif path == METRICS_PATH and method in ("GET", "HEAD"):
            await self._metrics.serve(send, with_body=method == "GET")
        elif path == _OPENAPI_PATH and method == "GET":
            engines, has_batches = await self._mounts.openapi(), self._batches is not None
            await send_json(send, 200, describe(engines, _is_served, has_batches=has_batches))
        elif method in ("GET", "HEAD"):
            status, body = self._own_answer(method, path, caller)
            await send_json(send, status, body, with_body=method == "GET")
        else:
            raise no_such_path(method, path)

    async def ask(self, caller: Caller, path: str, body: bytes) -> JsonAnswer:
        """Answer a request of a batch, as from a client; never raises because of the request."""
        exchange, ids = Exchange(path, body), RequestIds()
        send = sending_id(exchange.send, ids)
        try:
            with self._traces.request(exchange.scope, ids.http_id) as traced:
                await self._route_by_model(
                    caller, exchange.scope, exchange.receive, send, ids, traced
                )
        except ApiError as error:
            await send_error(send, error)
        except Exception:
            logger.exception("a request of a batch to %s failed", path)
        return exchange.answer(ids.http_id)

    def _own_answer(self, method: str, path: str, caller: Caller) -> tuple[int, object]:
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/ready":
            return (200 if self._catalog.ready else 503), {"ready": self._catalog.ready}
        if path == "/version":
            return 200, {"version": __version__}
        if path == "/v1/models":
            return 200, {"object": "list", "data": self._catalog.list_rows(caller.models)}
        if path.startswith(_MODELS_PREFIX):
            return 200, model_row(self._catalog.find(path[len(_MODELS_PREFIX) :], caller.models))
        raise no_such_path(method, path)

    async def _route_by_model(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
        ids: RequestIds,
        traced: TracedRequest,
        fleet_call: FleetCall | None = None,
    ) -> None:
        bounds, path = self._bounds, scope["path"]
        with bounds.in_flight.holding(caller.key_id) as holding:
            max_bytes = bounds.max_body_bytes
            if fleet_call is not None:
                max_bytes += fleet_call.max_further_bytes
            body = await read_body(scope, receive, max_bytes, holding)
            so_far = None
            if fleet_call is not None:
                body, so_far = fleet_call.opened(body)
            head = read_head(body, path)
            scope = with_id(scope, ids, body_has_id=head.has_id)
            model, mount = await self._lookup.find(head.model, caller.models)
            traced.model = model.name
            _check_served(mount, path)
            if model.preset is not None:
                body = _with_defaults(body, model.preset, path, holding)
            check_num_requests(head, caller.max_requests(bounds.max_live_requests))
            holding.add((head.num_samples - 1) * len(body))
            receive = replay(body, receive)
            del body  # the API drops its reference after reading
            with (
                serving(caller, model),
                naming(ids),
                counting_prompts(head.num_samples),
                bounding_images(holding, self._decoding),
                pacing(wanted_gap_s(scope, caller.pace, model.pace)),
                continuing(so_far),
            ):
                wants = self._gates.may_comment and wants_comments(scope)
                async with self._gates.holding(
                    send, wants_comments=wants, tells_tokens=fleet_call is not None
                ) as gate:
                    traced.answer = gate.answer
                    await self._mounts.serve(mount, scope, receive, gate.send)

    async def _route_by_response(
        self, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response_id, _, action = scope["path"][len(_RESPONSES_PREFIX) :].partition("/")
        if (scope["method"], action) not in (("GET", ""), ("POST", "cancel")):
            raise no_such_path(scope["method"], scope["path"])
        mount = self._mounts.find_response(response_id)
        if mount is None or not (caller.models is None or mount.name in caller.models):
            raise no_such_response(response_id)
        await self._mounts.serve(mount, scope, receive, send)


def _with_defaults(body: bytes, preset: Preset, path: str, holding: BodyHolding) -> bytes:
    """Return a request's body with the preset's defaults, whose bytes count too."""
    fields = msgspec.json.decode(body)
    filled = msgspec.json.encode(with_defaults(fields, preset.defaults, path))
    holding.add(max(0, len(filled) - len(body)))
    return filled


def _check_served(mount: Mount, path: str) -> None:
    """Check that a model has the API of ``path``.

    Raises:
        ApiError: 400; the model is of another kind.
    """
    served = mount.api.paths & ROUTED_PATHS
    if path not in served:
        raise not_of_this_kind(mount.name, path, sorted(served))


def _is_served(path: str) -> bool:
    """Return whether a path of a model's API is within reach of clients."""
    return path in ROUTED_PATHS or path.startswith(_RESPONSES_PREFIX)


def _is_batch_path(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}/") for one in (FILES, BATCHES))


def _is_unix(scope: Scope) -> bool:
    """Return whether the connection uses a unix socket, which no browser can open."""
    server = scope.get("server")
    return server is not None and server[1] is None
