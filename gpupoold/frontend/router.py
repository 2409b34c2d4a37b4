"""The ASGI application of a frontend: finds a request's model and hands it to that model's API.

Only the paths named here are served. The applications behind also register
operator endpoints (scaling, profiling, raw metrics); those stay out of reach.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import MutableMapping
from typing import Any

import msgspec

from gpupoold import __version__
from gpupoold.frontend.callers import Caller, Callers, serving, without_credentials
from gpupoold.frontend.catalog import Catalog, model_row
from gpupoold.frontend.errors import (
    ApiError,
    bad_request,
    method_not_allowed,
    no_such_path,
    no_such_response,
    not_ready,
    send_error,
    send_json,
    too_large,
    too_slow,
)
from gpupoold.frontend.gates import Gates
from gpupoold.frontend.metrics import METRICS_PATH, MetricsCalls
from gpupoold.frontend.mounts import Mount, Mounts, Receive, Scope, Send
from gpupoold.frontend.openapi import describe
from gpupoold.wire.messages import ServedModel

logger = logging.getLogger(__name__)

ROUTED_PATHS = frozenset(
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
# For load balancers and service managers, which have no key: they tell nothing of models.
_OPEN_PATHS = frozenset({"/health", "/ready"})
_RESPONSES_PREFIX = "/v1/responses/"
_MODELS_PREFIX = "/v1/models/"
_OPENAPI_PATH = "/openapi.json"
_RETRY_UNMOUNTED_S = 1.0
_BODY_TIMEOUT_S = 60.0


class _Disconnected(Exception):
    """The client left while its request was being read."""


class _Head(msgspec.Struct):
    """The one field of a request that the router reads."""

    model: Any = None


_head_decoder = msgspec.json.Decoder(_Head)


def read_model_name(body: bytes) -> str | None:
    """The ``model`` of a JSON request, None when it has none.

    Raises:
        ApiError: 400; the body is not a JSON object, or ``model`` not a string.
    """
    try:
        head = _head_decoder.decode(body)
    except msgspec.ValidationError as error:
        raise bad_request("The request body must be a JSON object.") from error
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise bad_request(f"The request body is not valid JSON: {error}") from error
    if head.model is not None and not isinstance(head.model, str):
        raise bad_request("`model` must be a string.", param="model")
    return head.model


class Router:
    """Routes requests by their ``model``; answers what belongs to no model itself.

    ``max_body_bytes`` may change at any time.
    """

    def __init__(
        self,
        catalog: Catalog,
        mounts: Mounts,
        gates: Gates,
        metrics: MetricsCalls,
        callers: Callers,
        max_body_bytes: int,
    ) -> None:
        self._catalog = catalog
        self._mounts = mounts
        self._gates = gates
        self._callers = callers
        self.max_body_bytes = max_body_bytes
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point; never raises because of a request."""
        if scope["type"] != "http":
            await _refuse_websocket(scope, receive, send)
            return
        try:
            await self._dispatch(scope, receive, send)
        except _Disconnected:
            pass
        except ApiError as error:
            anthropic = scope["path"].startswith("/v1/messages")
            await send_error(send, error, anthropic=anthropic)
        except Exception:
            # The model's API has answered 500 itself; if not, the server does.
            logger.exception("%s %s failed", scope["method"], scope["path"])

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        is_open = path in _OPEN_PATHS
        caller = Caller() if is_open else self._callers.identify(scope["headers"])
        if path == "/metrics":
            caller.check_metrics()
        if path in ROUTED_PATHS:
            if method != "POST":
                raise method_not_allowed(method, path)
            self._callers.begin(caller)
            await self._route_by_model(caller, without_credentials(scope), receive, send)
        elif path.startswith(_RESPONSES_PREFIX):
            self._callers.begin(caller)
            await self._route_by_response(caller, without_credentials(scope), receive, send)
        elif path == METRICS_PATH and method in ("GET", "HEAD"):
            await self._metrics.serve(send, with_body=method == "GET")
        elif path == _OPENAPI_PATH and method == "GET":
            await send_json(send, 200, describe(await self._mounts.openapi(), _is_served))
        elif method in ("GET", "HEAD"):
            status, body = self._own_answer(method, path, caller)
            await send_json(send, status, body, with_body=method == "GET")
        else:
            raise no_such_path(method, path)

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
        self, caller: Caller, scope: Scope, receive: Receive, send: Send
    ) -> None:
        body = await self._read_body(scope, receive)
        model = self._catalog.choose(read_model_name(body), caller.models)
        mount, receive = self._mounted(model), _replay(body, receive)
        with serving(caller):
            async with self._gates.holding(send) as gate:
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

    def _mounted(self, model: ServedModel) -> Mount:
        mount = self._mounts.get(model.name)
        if mount is None:
            starting = msgspec.structs.replace(
                model, state="starting", reason="", retry_after_s=_RETRY_UNMOUNTED_S
            )
            raise not_ready(starting)
        return mount

    async def _read_body(self, scope: Scope, receive: Receive) -> bytes:
        if _declared_length(scope) > self.max_body_bytes:
            raise too_large(self.max_body_bytes)
        chunks: list[bytes] = []
        num_bytes = 0
        while True:
            try:
                async with asyncio.timeout(_BODY_TIMEOUT_S):
                    message = await receive()
            except TimeoutError:
                raise too_slow(_BODY_TIMEOUT_S) from None
            if message["type"] == "http.disconnect":
                raise _Disconnected
            chunk = message.get("body", b"")
            num_bytes += len(chunk)
            if num_bytes > self.max_body_bytes:
                raise too_large(self.max_body_bytes)
            chunks.append(chunk)
            if not message.get("more_body"):
                return b"".join(chunks)


def _is_served(path: str) -> bool:
    """Whether a path of a model's API is within reach of clients."""
    return path in ROUTED_PATHS or path.startswith(_RESPONSES_PREFIX)


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


def _replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` for the application: the body once, then the client's own messages."""
    replayed = False

    async def receive_again() -> MutableMapping[str, Any]:
        nonlocal replayed
        if replayed:
            return await receive()
        replayed = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again


async def _refuse_websocket(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await receive()
        await send({"type": "websocket.close", "code": 1008})
