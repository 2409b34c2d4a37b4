"""The application of the admin API, and access by the caller's process as the kernel reports it."""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from inspect import Parameter, Signature, signature
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from gpupoold import __version__
from gpupoold.access.peers import AdminGroups, Peer, Right, needed_for, peer_of
from gpupoold.admin.handlers import Handlers, error_body
from gpupoold.api.admin_api import OPERATIONS, Operation
from gpupoold.control.control_plane import ControlPlane
from gpupoold.errors import Forbidden, GpupoolError, TimedOut, Unavailable, UsageError
from gpupoold.metrics.exposition import Exporter
from gpupoold.system.http_protocol import BoundedHttp, unread_coding
from gpupoold.units import plain_problem

_PEER = "peer"
_ERRORS: dict[HTTPStatus, type[GpupoolError]] = {
    HTTPStatus.FORBIDDEN: Forbidden,
    HTTPStatus.SERVICE_UNAVAILABLE: Unavailable,
    HTTPStatus.REQUEST_TIMEOUT: TimedOut,
}


def build_app(control_plane: ControlPlane, exporter: Exporter) -> FastAPI:
    """Return the application of the admin API for ``control_plane``."""
    app = FastAPI(title="gpupoold", version=__version__, docs_url=None, redoc_url=None)
    app.add_exception_handler(GpupoolError, _on_error)
    app.add_exception_handler(UnicodeEncodeError, _on_surrogate)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    add_operations(app, Handlers(control_plane, exporter))
    return app


def add_operations(app: FastAPI, handlers: object) -> None:
    """Add each operation's route, with the method of ``handlers`` that has the operation's name.

    Raises TypeError: an operation has no handler with its parameters, or a handler no operation.
    """
    found = {name for name in vars(type(handlers)) if not name.startswith("_")}
    if found != OPERATIONS.keys():
        raise TypeError(f"operations and handlers differ: {sorted(found ^ OPERATIONS.keys())}")
    for operation in OPERATIONS.values():
        _add(app, operation, getattr(handlers, operation.name))


def _add(app: FastAPI, operation: Operation, handler: Callable[..., Awaitable[Any]]) -> None:
    parameters = operation.parameters
    names = {parameter.name for parameter in parameters}
    handled = signature(handler).parameters.keys()
    if handled - {"request"} != names:
        raise TypeError(f"{operation.name} and its handler have other parameters")
    if "request" in handled:
        parameters.append(Parameter("request", Parameter.KEYWORD_ONLY, annotation=Request))

    async def endpoint(**arguments: Any) -> Any:
        answer = await handler(**arguments)
        if isinstance(answer, AsyncIterator | Iterator):
            return StreamingResponse(answer, media_type="application/x-ndjson")
        return answer

    endpoint.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    path = operation.path
    for parameter in parameters:
        if parameter.annotation is str:
            path = path.replace(f"{{{parameter.name}}}", f"{{{parameter.name}:path}}")
    app.add_api_route(
        path,
        endpoint,
        methods=[operation.method],
        name=operation.name,
        response_model=None if operation.is_stream else operation.answer,
    )


async def _on_error(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, GpupoolError)
    return JSONResponse(_error_body(error), status_code=error.http_status)


async def _on_surrogate(request: Request, _: Exception) -> JSONResponse:
    return await _on_error(request, UsageError("a text has half of a surrogate pair"))


async def _on_validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = [
        f"{'.'.join(map(str, p['loc'][1:]))}: {plain_problem(p['msg'])}" for p in error.errors()
    ]
    return await _on_error(request, UsageError("; ".join(problems)))


class Door:
    """The limit of connections per user, and the groups with access.

    The limit protects the descriptors that workers need.
    """

    max_connections = 128

    def __init__(self, groups: AdminGroups) -> None:
        self.groups = groups
        self._num_connections: Counter[int] = Counter()

    def protocol(self) -> Callable[..., PeerProtocol]:
        """Return a factory of this door's connections."""
        return functools.partial(PeerProtocol, self)

    def enter(self, peer: Peer) -> bool:
        """Count a connection; return False if the user has too many connections."""
        self._num_connections[peer.user_id] += 1
        return self._num_connections[peer.user_id] <= self.max_connections

    def leave(self, peer: Peer) -> None:
        self._num_connections[peer.user_id] -= 1
        if not self._num_connections[peer.user_id]:
            del self._num_connections[peer.user_id]


class PeerProtocol(BoundedHttp):
    """A connection that puts the caller into the state of its requests.

    ASGI has no field for credentials of a unix socket; ``state`` carries server data to an
    application. A caller without a right is refused at once; the connection is closed after
    ``linger_s`` at the latest.
    """

    linger_s = 1.0
    body_timeout_s = 60.0
    max_body_bytes = 1 << 20

    app_state: dict[str, Any]
    _peer: Peer | None = None
    _checking: asyncio.Task[None] | None = None
    _is_refused = False
    _body_bytes = 0
    _body_timer: asyncio.TimerHandle | None = None

    def __init__(self, door: Door, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._door = door

    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        return _error_body(_ERRORS.get(status, UsageError)(message))

    def connection_made(self, transport: Any) -> None:
        """Identify the caller and count the connection."""
        super().connection_made(transport)
        self._peer = peer = peer_of(transport.get_extra_info("socket"))
        self.app_state = self.app_state | {_PEER: peer}
        if not self._door.enter(peer):
            self._refuse_too_many(peer)
        elif self._door.groups.right_of(peer) < Right.READ:
            transport.pause_reading()
            self._checking = self.loop.create_task(self._check(peer))

    def connection_lost(self, exc: Exception | None) -> None:
        """Discount the connection."""
        if self._peer is not None:
            self._door.leave(self._peer)
        if self._checking is not None:
            self._checking.cancel()
        self._stop_body_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, unless the request was refused."""
        if not self._is_refused:
            super().data_received(data)

    def on_headers_complete(self) -> None:
        """Start the time limit for the body."""
        super().on_headers_complete()
        self._body_bytes = 0
        self._stop_body_timer()
        self._body_timer = self.loop.call_later(self.body_timeout_s, self._give_up_body)

    def on_body(self, body: bytes) -> None:
        """Take a piece of the body, or refuse a body that is too large."""
        self._body_bytes += len(body)
        if self._body_bytes > self.max_body_bytes and not self.transport.is_closing():
            self._refuse_body(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the request body is larger than {self.max_body_bytes} bytes",
            )
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._stop_body_timer()
        super().on_message_complete()

    def _refuse_too_many(self, peer: Peer) -> None:
        self._is_refused = True
        error = Unavailable(
            f"the user {peer.user_id} has {self._door.max_connections} connections to the admin"
            " socket already",
            "close some connections, then try again",
        )
        self.transport.write(self.answer(HTTPStatus(error.http_status), _error_body(error)))
        self.transport.close()

    async def _check(self, peer: Peer) -> None:
        try:
            await self._door.groups.check(peer, Right.READ)
        except Forbidden as error:
            self._refuse_caller(error)
        else:
            self.transport.resume_reading()  # the look-up has found the peer's groups

    def _refuse_caller(self, error: GpupoolError) -> None:
        """Answer any request with ``error``, then close."""
        self._is_refused = True
        body = _error_body(error)
        self.transport.write(self.answer(HTTPStatus(error.http_status), body))
        self.transport.write_eof()
        # After an immediate close, a client that is still sending could lose the answer.
        self.loop.call_later(self.linger_s, self.transport.abort)
        self.transport.resume_reading()

    def _refuse_body(self, status: HTTPStatus, message: str) -> None:
        self._stop_body_timer()
        if self.cycle.response_started:
            self.transport.close()
        else:
            self.refuse(status, message)

    def _give_up_body(self) -> None:
        self._body_timer = None
        if not self.transport.is_closing():
            self._refuse_body(
                HTTPStatus.REQUEST_TIMEOUT,
                f"the request body has not come within {self.body_timeout_s:g} s",
            )

    def _stop_body_timer(self) -> None:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None


class Guard:
    """An ASGI application that passes permitted calls on to another application."""

    def __init__(self, app: ASGIApp, groups: AdminGroups) -> None:
        self._app = app
        self._groups = groups

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or answer 403 or 415 with the reason and a hint."""
        peer: Peer = scope["state"][_PEER]
        app: ASGIApp = self._app
        try:
            await self._groups.check(peer, needed_for(scope["method"]))
        except Forbidden as error:
            app = JSONResponse(_error_body(error), status_code=error.http_status)
        else:
            if (coding := unread_coding(scope["headers"])) is not None:
                unread = UsageError(
                    f"Content-Encoding {coding} is not supported", "send it as it is"
                )
                app = JSONResponse(_error_body(unread), HTTPStatus.UNSUPPORTED_MEDIA_TYPE)
        await app(scope, receive, send)


def _error_body(error: GpupoolError) -> dict[str, object]:
    return {"error": error_body(error).model_dump()}
