"""The ASGI application of a frontend: routes a request to its model's API."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

import msgspec

from gpupoold import __version__
from gpupoold.checkpoints.peers import PATH as CHECKPOINTS_PATH
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import with_defaults
from gpupoold.frontend.anthropic_errors import with_errors_of
from gpupoold.frontend.batches.exchange import Exchange
from gpupoold.frontend.batches.service import BatchService
from gpupoold.frontend.batches.work import JsonAnswer
from gpupoold.frontend.body import Disconnected, let_others_run, read_body, replay, without_bom
from gpupoold.frontend.callers import Caller, Callers, serving, without_credentials
from gpupoold.frontend.catalog import Catalog, model_row
from gpupoold.frontend.checkpoint_files import CheckpointFiles
from gpupoold.frontend.cors import Cors
from gpupoold.frontend.errors import (
    ApiError,
    allow_header,
    method_not_allowed,
    no_such_path,
    no_such_response,
    not_of_this_kind,
    send_empty,
    send_error,
    send_json,
    unread_encoding,
)
from gpupoold.frontend.fleet_calls import FleetCall, FleetCalls, continuing
from gpupoold.frontend.gates import Gates
from gpupoold.frontend.image_bounds import NUM_DECODING, bounding_images
from gpupoold.frontend.in_flight import BodyHolding, BytesInFlight
from gpupoold.frontend.logprob_bounds import counting_logprobs
from gpupoold.frontend.metrics import MetricsCalls
from gpupoold.frontend.model_lookup import Hold, ModelLookup
from gpupoold.frontend.model_names import answering_as
from gpupoold.frontend.mounts import Mount, Mounts, Receive, Scope, Send
from gpupoold.frontend.openapi import describe
from gpupoold.frontend.origins import check_host, check_origin
from gpupoold.frontend.pacing import pacing, wanted_gap_s
from gpupoold.frontend.pooling_inputs import (
    INPUTS_AT_ONCE,
    pooling_inputs,
    without_token_ids,
)
from gpupoold.frontend.prompt_bounds import counting_prompts
from gpupoold.frontend.request_head import check_num_requests, read_head
from gpupoold.frontend.request_ids import RequestIds, naming, sending_id, with_id
from gpupoold.frontend.routes import (
    METRICS_PATH,
    MODELS_PREFIX,
    OPEN_PATHS,
    OPENAPI_PATH,
    RESPONSES_PREFIX,
    ROUTED_PATHS,
    WHERE,
    is_batch_path,
    methods_of,
    without_slash,
)
from gpupoold.frontend.traces import TracedRequest, Traces
from gpupoold.frontend.waiting import wants_comments
from gpupoold.system.content_coding import unread_coding

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Bounds:
    """Limits of live requests and bytes; may change at any time.

    ``max_live_requests`` is per model, ``in_flight`` for this process.
    """

    max_body_bytes: int
    max_live_requests: int
    in_flight: BytesInFlight
    hold: Hold = field(default_factory=Hold)


@dataclass(frozen=True, slots=True)
class Services:
    """What a frontend serves beside the models' APIs, and asks of the daemon for this."""

    metrics: MetricsCalls
    traces: Traces = field(default_factory=lambda: Traces(""))
    batches: BatchService | None = None
    fleet_calls: FleetCalls = field(default_factory=FleetCalls)


class Router:
    """Routes requests by ``model``; answers requests without a model itself."""

    def __init__(
        self,
        catalog: Catalog,
        mounts: Mounts,
        gates: Gates,
        callers: Callers,
        bounds: Bounds,
        services: Services,
    ) -> None:
        self._catalog = catalog
        self._mounts = mounts
        self._gates = gates
        self._callers = callers
        self._bounds = bounds
        self._lookup = ModelLookup(catalog, mounts, bounds.hold)
        self._metrics = services.metrics
        self._traces = services.traces
        self._batches = services.batches
        self._fleet_calls = services.fleet_calls
        self._checkpoint_files = CheckpointFiles(self._fleet_calls)
        self._decoding = asyncio.Semaphore(NUM_DECODING)
        self._cors = Cors(self._serve, callers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point; never raises because of a request."""
        await self._cors(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = without_slash(scope["path"])
        ids = RequestIds()
        send = with_errors_of(scope["path"], sending_id(send, ids))
        try:
            await self._dispatch(scope, receive, send, ids)
        except Disconnected:
            pass
        except ApiError as error:
            await send_error(send, error)
        except Exception:
            # The model's API has answered 500, or else the server does.
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send, ids: RequestIds) -> None:
        path, method = scope["path"], scope["method"]
        if path.startswith(CHECKPOINTS_PATH):
            await self._checkpoint_files.serve(scope, receive, send)
            return
        methods = methods_of(path, has_batches=self._batches is not None)
        if method == "OPTIONS" and methods:
            check_origin(scope["headers"], self._callers)
            await send_empty(send, [allow_header(methods)])
            return
        caller = self._permitted(scope)
        if not methods:
            raise no_such_path(method, path)
        if method not in methods:
            raise method_not_allowed(method, path, methods)
        if (coding := unread_coding(scope["headers"])) is not None:
            raise unread_encoding(coding)
        with_body = method != "HEAD"
        if path in ROUTED_PATHS:
            fleet_call = self._fleet_calls.find(scope)
            await self._callers.begin(caller)
            with self._traces.request(scope, ids.http_id) as traced:
                scope = without_credentials(scope)
                await self._route_by_model(caller, scope, receive, send, ids, traced, fleet_call)
        elif path.startswith(RESPONSES_PREFIX):
            await self._callers.begin(caller)
            await self._route_by_response(caller, without_credentials(scope), receive, send)
        elif self._batches is not None and is_batch_path(path):
            await self._callers.begin(caller)
            await self._batches.serve(caller, without_credentials(scope), receive, send)
        elif path == METRICS_PATH:
            await self._metrics.serve(send, with_body=with_body)
        elif path == OPENAPI_PATH:
            engines, has_batches = await self._mounts.openapi(), self._batches is not None
            description = describe(engines, _is_served, has_batches=has_batches)
            await send_json(send, 200, description, with_body=with_body)
        else:
            status, body = self._own_answer(path, caller)
            await send_json(send, status, body, with_body=with_body)

    def _permitted(self, scope: Scope) -> Caller:
        """Return the caller of a request that may be answered.

        Raises:
            ApiError: 401, 403, 421 or 503.
        """
        headers, path = scope["headers"], scope["path"]
        if path in OPEN_PATHS:
            return Caller()
        caller = self._callers.identify(headers)
        if caller.key is None and not _is_unix(scope):
            check_host(headers, self._callers)
            check_origin(headers, self._callers)
        if path == METRICS_PATH:
            caller.check_metrics()
        return caller

    async def ask(self, caller: Caller, path: str, body: bytes) -> JsonAnswer:
        """Answer a request of a batch, as from a client; never raises because of the request."""
        exchange, ids = Exchange(path, body), RequestIds()
        send = sending_id(exchange.send, ids)
        try:
            with self._traces.request(exchange.scope, ids.http_id) as traced:
                await exchange.run(
                    self._route_by_model(
                        caller, exchange.scope, exchange.receive, send, ids, traced
                    )
                )
        except ApiError as error:
            await send_error(send, error)
        except Exception:
            logger.exception("a request of a batch to %s failed", path)
        return exchange.answer(ids.http_id)

    def _own_answer(self, path: str, caller: Caller) -> tuple[int, object]:
        if path == "/":
            return 200, WHERE
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/ready":
            return (200 if self._catalog.ready else 503), {"ready": self._catalog.ready}
        if path == "/version":
            return 200, {"version": __version__}
        if path == "/v1/models":
            return 200, {"object": "list", "data": self._catalog.list_rows(caller.models)}
        return 200, model_row(self._catalog.find(path.removeprefix(MODELS_PREFIX), caller.models))

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
            body = without_bom(body)
            head = read_head(body, path)
            await let_others_run(len(body))  # vLLM reads and validates it again
            scope = with_id(scope, ids, body_has_id=head.has_id)
            model, mount = await self._lookup.find(head.model, caller.models)
            traced.model = model.name
            _check_served(mount, path)
            if model.preset is not None:
                body = _with_defaults(body, model.preset, path, holding)
            max_live = caller.max_requests(bounds.max_live_requests)
            check_num_requests(head, max_live)
            body, token_ids = without_token_ids(body) if head.is_pooling else (body, None)
            holding.add((head.num_samples - 1) * len(body))
            receive = replay(body, receive)
            del body  # the API drops its reference after reading
            with (
                serving(caller, model),
                naming(ids),
                answering_as(head.model or model.name),
                counting_prompts(head.num_prompts, head.num_samples),
                counting_logprobs(head.has_limit, path),
                pooling_inputs(token_ids, min(INPUTS_AT_ONCE, max_live)),
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
        response_id = scope["path"].removeprefix(RESPONSES_PREFIX).partition("/")[0]
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
    return path in ROUTED_PATHS or path.startswith(RESPONSES_PREFIX)


def _is_unix(scope: Scope) -> bool:
    """Return whether the connection uses a unix socket, which no browser can open."""
    server = scope.get("server")
    return server is not None and server[1] is None
