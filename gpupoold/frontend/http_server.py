"""The HTTP server of a frontend, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import uvicorn
from uvicorn.server import ServerState

from gpupoold.access.tls import Tls
from gpupoold.frontend.anthropic_errors import with_errors_of
from gpupoold.frontend.errors import send_error, stopping
from gpupoold.frontend.http_protocol import PublicHttp
from gpupoold.frontend.mounts import AsgiApp, Receive, Scope, Send
from gpupoold.system.http_protocol import Server, server_config

_BODY_TIMEOUT_S = 5.0


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
