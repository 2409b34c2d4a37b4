"""The ASGI application of a frontend: routes a request to its model's API."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs

import msgspec
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from gpupoold import __version__
from gpupoold.access.fleet import HEADER, sign
from gpupoold.checkpoints.download import finished_downloads
from gpupoold.checkpoints.manifest import Manifest
from gpupoold.checkpoints.peers import LISTING_METHOD, PATH as CHECKPOINTS_PATH, Listing
from gpupoold.checkpoints.resolve import is_hub_id
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import with_defaults
from gpupoold.frontend import errors, request_context
from gpupoold.frontend.answer_fields import with_errors_of
from gpupoold.frontend.batches.openapi import PATHS as BATCH_PATHS
from gpupoold.frontend.batches.service import BatchService, Exchange
from gpupoold.frontend.batches.work import JsonAnswer
from gpupoold.frontend.body import (
    Disconnected,
    check_num_requests,
    let_others_run,
    read_body,
    read_head,
    replay,
    without_bom,
)
from gpupoold.frontend.callers import (
    Caller,
    Callers,
    Cors,
    FleetCall,
    FleetCalls,
    check_host,
    check_origin,
    continued,
    serving,
    without_credentials,
)
from gpupoold.frontend.client_answer import TracedRequest, Traces
from gpupoold.frontend.conversations import POOLING_PATHS, without_token_ids
from gpupoold.frontend.daemon_calls import MetricsCalls
from gpupoold.frontend.gates import Gates, wanted_gap_s, wanted_pace, wants_comments
from gpupoold.frontend.mounts import Catalog, ModelScope as ModelScope, Mount, Mounts, model_row
from gpupoold.frontend.openapi import describe
from gpupoold.system.http_protocol import unread_coding
from gpupoold.wire.messages import ServedModel

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
"""Paths whose requests name a model in the body."""
# Paths for load balancers and service managers, which have no key; the answers name no model.
OPEN_PATHS = frozenset({"/health", "/ready"})
RESPONSES_PREFIX = "/v1/responses/"
MODELS_PREFIX = "/v1/models/"
OPENAPI_PATH = "/openapi.json"
# For those who open the address in a browser.
WHERE = {
    "gpupool": "many models behind OpenAI's and Anthropic's API, below /v1",
    "models": "/v1/models",
    "description": OPENAPI_PATH,
    "documentation": "docs/api.md",
}
METRICS_PATH = "/metrics"

_RETRY_UNMOUNTED_S = 1.0
_POLL_S = 0.05
_READ = ("GET", "HEAD")
_FIXED = {
    **dict.fromkeys(ROUTED_PATHS, ("POST",)),
    **dict.fromkeys(
        (*OPEN_PATHS, "/", "/version", "/v1/models", METRICS_PATH, OPENAPI_PATH), _READ
    ),
}
_PATTERNS = {
    re.compile(r"/v1/models/.+", re.DOTALL): _READ,
    re.compile(r"/v1/responses/[^/]+"): ("GET",),
    re.compile(r"/v1/responses/[^/]+/cancel"): ("POST",),
    **{
        re.compile(re.sub(r"\{\w+\}", "[^/]+", path)): tuple(sorted(map(str.upper, operations)))
        for path, operations in BATCH_PATHS.items()
    },
}


@dataclass(slots=True)
class Bounds:
    """Limits of live requests and bytes; may change at any time, and are 0 until the daemon tells.

    ``max_live_requests`` is per model, ``in_flight`` for this process.
    """

    max_body_bytes: int = 0
    max_live_requests: int = 0
    in_flight: request_context.BytesInFlight = field(
        default_factory=lambda: request_context.BytesInFlight(0)
    )
    hold_until_s: float = 0.0
    """The end of the time, on the monotonic clock, in which requests wait for their model."""


@dataclass(frozen=True, slots=True)
class Services:
    """What a frontend serves beside the models' APIs, and asks of the daemon for this."""

    metrics: MetricsCalls
    batches: BatchService
    traces: Traces = field(default_factory=lambda: Traces(""))
    fleet_calls: FleetCalls = field(default_factory=FleetCalls)


@dataclass(eq=False)
class Router:
    """Routes requests by ``model``; answers requests without a model itself."""

    catalog: Catalog
    mounts: Mounts
    gates: Gates
    callers: Callers
    bounds: Bounds
    services: Services

    def __post_init__(self) -> None:
        self._checkpoint_files = CheckpointFiles(self.services.fleet_calls)
        self._decoding = asyncio.Semaphore(request_context.NUM_DECODING)
        self._cors = Cors(self._serve, self.callers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point; never raises because of a request."""
        await self._cors(scope, receive, send)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["path"] = without_slash(scope["path"])
        ids = request_context.RequestIds()
        send = with_errors_of(scope["path"], request_context.sending_id(send, ids))
        try:
            await self._dispatch(scope, receive, send, ids)
        except Disconnected:
            pass
        except errors.ApiError as error:
            await errors.send_error(send, error)
        except Exception:
            # The model's API has answered 500, or else the server does.
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def _dispatch(
        self, scope: Scope, receive: Receive, send: Send, ids: request_context.RequestIds
    ) -> None:
        path, method = scope["path"], scope["method"]
        if path.startswith(CHECKPOINTS_PATH):
            await self._checkpoint_files.serve(scope, receive, send)
            return
        methods = methods_of(path)
        if method == "OPTIONS" and methods:
            check_origin(scope["headers"], self.callers)
            await errors.send_empty(send, [errors.allow_header(methods)])
            return
        caller = self._permitted(scope)
        if not methods:
            raise errors.no_such_path(method, path)
        if method not in methods:
            raise errors.method_not_allowed(method, path, methods)
        if (coding := unread_coding(scope["headers"])) is not None:
            raise errors.ApiError(
                415,
                f"Content-Encoding {coding} is not supported: send the body as it is, without "
                "compression.",
                more_headers=[(b"accept-encoding", b"identity")],
            )
        with_body = method != "HEAD"
        if path in ROUTED_PATHS:
            fleet_call = self.services.fleet_calls.find(scope)
            await self.callers.begin(caller)
            with self.services.traces.request(scope, ids.http_id) as traced:
                scope = without_credentials(scope)
                await self._route_by_model(caller, scope, receive, send, ids, traced, fleet_call)
        elif path.startswith(RESPONSES_PREFIX):
            await self.callers.begin(caller)
            await self._route_by_response(caller, without_credentials(scope), receive, send)
        elif path.startswith(("/v1/files", "/v1/batches")):
            await self.callers.begin(caller)
            await self.services.batches.serve(caller, without_credentials(scope), receive, send)
        elif path == METRICS_PATH:
            await self.services.metrics.serve(send, with_body=with_body)
        elif path == OPENAPI_PATH:
            description = describe(await self.mounts.openapi(), _is_served)
            await errors.send_json(send, 200, description, with_body=with_body)
        else:
            status, body = self._own_answer(path, caller)
            await errors.send_json(send, status, body, with_body=with_body)

    def _permitted(self, scope: Scope) -> Caller:
        headers, path = scope["headers"], scope["path"]
        if path in OPEN_PATHS:
            return Caller()
        caller = self.callers.identify(headers)
        server = scope.get("server")
        is_unix = server is not None and server[1] is None  # a socket that no browser can open
        if caller.key is None and not is_unix:
            check_host(headers, self.callers)
            check_origin(headers, self.callers)
        if path == METRICS_PATH:
            caller.check_metrics()
        return caller

    async def ask(self, caller: Caller, path: str, body: bytes) -> JsonAnswer:
        """Answer a request of a batch, as from a client; never raises because of the request."""
        exchange, ids = Exchange(path, body), request_context.RequestIds()
        send = request_context.sending_id(exchange.send, ids)
        try:
            with self.services.traces.request(exchange.scope, ids.http_id) as traced:
                await exchange.run(
                    self._route_by_model(
                        caller, exchange.scope, exchange.receive, send, ids, traced
                    )
                )
        except errors.ApiError as error:
            await errors.send_error(send, error)
        except Exception:
            logger.exception("a request of a batch to %s failed", path)
        return exchange.answer(ids.http_id)

    def _own_answer(self, path: str, caller: Caller) -> tuple[int, object]:
        if path == "/":
            return 200, WHERE
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/ready":
            return (200 if self.catalog.ready else 503), {"ready": self.catalog.ready}
        if path == "/version":
            return 200, {"version": __version__}
        if path == "/v1/models":
            return 200, {"object": "list", "data": self.catalog.list_rows(caller.models)}
        return 200, model_row(self.catalog.find(path.removeprefix(MODELS_PREFIX), caller.models))

    async def _route_by_model(
        self,
        caller: Caller,
        scope: Scope,
        receive: Receive,
        send: Send,
        ids: request_context.RequestIds,
        traced: TracedRequest,
        fleet_call: FleetCall | None = None,
    ) -> None:
        bounds, path = self.bounds, scope["path"]
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
            scope = request_context.with_id(scope, ids, body_has_id=head.has_id)
            model, mount = await self._find(head.model, caller.models)
            traced.model = model.name
            served = mount.api.paths & ROUTED_PATHS
            if path not in served:
                raise errors.bad_request(
                    f"The model `{mount.name}` does not serve {path}; the model serves "
                    f"{', '.join(sorted(served))}.",
                    param="model",
                )
            if model.preset is not None:
                body = _with_defaults(body, model.preset, path, holding)
            max_live = caller.max_requests(bounds.max_live_requests)
            check_num_requests(head, max_live)
            body, token_ids = without_token_ids(body) if head.is_pooling else (body, None)
            holding.add((head.num_samples - 1) * len(body))
            receive = replay(body, receive)
            del body  # the API drops its reference after reading
            count = request_context.RequestTally(
                head.num_prompts,
                head.num_samples,
                asyncio.Semaphore(min(request_context.INPUTS_AT_ONCE, max_live)),
                head.has_limit,
                request_context.MAX_ENTRIES_AT_ONCE
                if path.startswith("/v1/responses")
                else request_context.MAX_ENTRIES,
                token_ids,
            )
            with (
                serving(caller, model),
                request_context.request_ids.holding(ids),
                request_context.answer_name.holding(head.model or model.name),
                request_context.counts.holding(count),
                request_context.bounding_images(self._decoding),
                wanted_pace.holding(wanted_gap_s(scope, caller.pace, model.pace)),
                continued.holding(so_far),
            ):
                wants = self.gates.may_comment and wants_comments(scope)
                async with self.gates.holding(
                    send, wants_comments=wants, tells_tokens=fleet_call is not None
                ) as gate:
                    traced.answer = gate.answer
                    await self.mounts.serve(mount, scope, receive, gate.send)

    async def _find(self, name: str | None, scope: ModelScope) -> tuple[ServedModel, Mount]:
        """Return the model and its mount; None means the only model.

        After the start of a frontend, a request for a model that is being loaded or mounted for the
        first time waits until ``bounds.hold_until_s``, so that a restart of the daemon delays new
        requests instead of refusing them. Raises ApiError: as ``Catalog.choose``; 503 for a model
        without a mount.
        """
        while True:
            try:
                model = self.catalog.choose(name, scope)
                if (mount := self.mounts.get(model.parent or model.name)) is not None:
                    return model, mount
                raise errors.not_ready(
                    msgspec.structs.replace(
                        model, state="starting", reason="", retry_after_s=_RETRY_UNMOUNTED_S
                    )
                )
            except errors.NotYet as error:
                is_over = time.monotonic() >= self.bounds.hold_until_s
                if is_over or self.mounts.was_mounted(error.model):
                    raise
            await asyncio.sleep(_POLL_S)

    async def _route_by_response(
        self, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        response_id = scope["path"].removeprefix(RESPONSES_PREFIX).partition("/")[0]
        mount = self.mounts.find_response(response_id)
        if mount is None or not (caller.models is None or mount.name in caller.models):
            text = f"Response with id '{errors.short(response_id)}' not found."
            raise errors.ApiError(404, text, param="id")
        await self.mounts.serve(mount, scope, receive, send)


def _with_defaults(
    body: bytes, preset: Preset, path: str, holding: request_context.BodyHolding
) -> bytes:
    fields = msgspec.json.decode(body)
    filled = msgspec.json.encode(with_defaults(fields, preset.defaults, path))
    holding.add(max(0, len(filled) - len(body)))
    return filled


def _is_served(path: str) -> bool:
    """Return whether a path of a model's API is within reach of clients."""
    return path in ROUTED_PATHS or path.startswith(RESPONSES_PREFIX)


class CheckpointFiles:
    """Serves the daemon's downloads.

    Requests must be signed with the fleet's secret; API keys do not count here.
    """

    def __init__(self, calls: FleetCalls) -> None:
        self._calls = calls

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request of a path below :data:`CHECKPOINTS_PATH`.

        Raises ApiError: 401 without the fleet's signature; 404 for anything but finished downloads.
        """
        path, method = scope["path"], scope["method"]
        if method != "GET":
            raise errors.method_not_allowed(method, path, ("GET",))
        call = self._calls.find(scope)
        if call is None:
            raise errors.ApiError(401, "Checkpoints are served to nodes of the fleet only.")
        call.opened(b"")
        org, _, rest = path.removeprefix(CHECKPOINTS_PATH).partition("/")
        name, _, rest = rest.partition("/")
        commit, _, file = rest.partition("/")
        folder, repo_id = self._calls.downloads, f"{org}/{name}"
        if not folder or not is_hub_id(repo_id):
            raise errors.no_such_path(method, path)
        found = await asyncio.to_thread(finished_downloads, Path(folder), repo_id)
        response = self._listing(scope, found) if not commit else _file(found, commit, file)
        if response is None:
            raise errors.no_such_path(method, path)
        await response(scope, receive, send)

    def _listing(self, scope: Scope, found: dict[Path, Manifest]) -> Response | None:
        query = scope.get("query_string", b"").decode("latin-1")
        revision = parse_qs(query).get("revision", [None])[0]
        for manifest in found.values():
            if manifest.revision == revision:
                body = msgspec.json.encode(Listing(manifest.commit, list(manifest.files)))
                target = f"{scope['path']}{'?' if query else ''}{query}"
                signature = sign(self._calls.secret, LISTING_METHOD, target, body)
                return Response(body, media_type="application/json", headers={HEADER: signature})
        return None


def _file(found: dict[Path, Manifest], commit: str, file: str) -> Response | None:
    for folder, manifest in found.items():
        # Only listed files, so that no path leads elsewhere.
        if manifest.commit == commit and file in {file.path for file in manifest.files}:
            return FileResponse(folder / file, media_type="application/octet-stream")
    return None


def methods_of(path: str) -> tuple[str, ...]:
    """Return the methods of a path, empty for a path that is not served.

    Only these paths are served. The applications behind also register operator endpoints (scaling,
    profiling, raw metrics), which stay out of reach.
    """
    if path in _FIXED:
        return _FIXED[path]
    return next((methods for pattern, methods in _PATTERNS.items() if pattern.fullmatch(path)), ())


def without_slash(path: str) -> str:
    """Return the path that a path with one slash too many at its end means."""
    return path[:-1] if path.endswith("/") and not path.endswith("//") and path != "/" else path
