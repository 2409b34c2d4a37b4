"""The HTTP server of a frontend, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from http import HTTPStatus

import uvicorn
from uvicorn import Config
from uvicorn.server import ServerState

from gpupoold.access.tls import Tls
from gpupoold.frontend.anthropic_errors import with_errors_of
from gpupoold.frontend.errors import ApiError, send_error, stopping
from gpupoold.frontend.mounts import AsgiApp, Receive, Scope, Send
from gpupoold.system.http_protocol import BoundedHttp, Server, server_config

_BODY_TIMEOUT_S = 5.0

_KINDS = {
    HTTPStatus.BAD_REQUEST: "BadRequestError",
    HTTPStatus.REQUEST_TIMEOUT: "RequestTimeoutError",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "RequestTooLargeError",
}


def http_config(app: AsgiApp, tls: Tls | None) -> uvicorn.Config:
    """Return the configuration of a server for the public API."""
    # The same context each time: renewed certificates are loaded into the context.
    contexts = None if tls is None else lambda *_: tls.context()
    return server_config(app, PublicHttp, server_header=False, ssl_context_factory=contexts)


class HttpServer(Server):
    """A server that calls ``on_accepting`` once.

    With ``refusing``, the server's end refuses new connections, and those without a request so far,
    while answers in progress are completed: ``refusing`` configures a server for these connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_accepting: Callable[[], None],
        refusing: uvicorn.Config | None = None,
    ) -> None:
        super().__init__(config)
        self._on_accepting = on_accepting
        self._refusing = refusing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Complete the answers in progress; see the class."""
        async with contextlib.AsyncExitStack() as stack:
            if self._refusing is not None:
                self._refusing.load()
                state = ServerState()
                for one in sockets or ():
                    stack.callback((await self._refuse(one.dup(), self._refusing, state)).close)
                for connection in tuple(self.server_state.connections):
                    if isinstance(connection, PublicHttp):
                        connection.move(self._refusing, state)
            await super().shutdown(sockets)

    async def _refuse(
        self, listener: socket.socket, config: uvicorn.Config, state: ServerState
    ) -> asyncio.Server:
        """Serve with connections of its own, which the end of the server does not wait for."""
        return await asyncio.get_running_loop().create_server(
            lambda: PublicHttp(config, state, {}), sock=listener, ssl=config.ssl
        )


async def refuse_stopping(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with 503: the ASGI application of a server that stops."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            # A connection closed before the body was read would be reset, without the answer.
            while (await receive()).get("more_body"):
                pass
    await send_error(with_errors_of(scope["path"], send), stopping())


class PublicHttp(BoundedHttp):
    """A connection of the public API."""

    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        return ApiError(status.value, _KINDS[status], message).body()

    def move(self, config: Config, state: ServerState) -> None:
        """Let the server of ``config`` and ``state`` have the connection, if it has no request."""
        if self.cycle is None:
            self.connections.discard(self)
            self.config, self.app = config, config.loaded_app
            self.server_state, self.tasks = state, state.tasks
            self.connections = state.connections
            self.connections.add(self)
