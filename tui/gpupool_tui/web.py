"""The application in a browser: ``gpupool top --web``, with ``textual-serve``.

The server listens on the loopback address only. Every local user can connect to such an address, so
each visitor needs the secret of the printed address: the first visit exchanges the secret for a
cookie that other sites cannot use. Each open page runs the application in a process of its own,
with the rights of the user who started the server.
"""

from __future__ import annotations

import asyncio
import secrets
import shlex
from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from textual_serve.server import Server

HOST = "127.0.0.1"
_COOKIE = "gpupool_top"
_SECRET = "secret"
_MAX_PAGES = 8
# The library's page names a font of another site, which is not to learn of the visit.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'wasm-unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src 'self' data:; font-src 'self' data:; "
    "connect-src 'self' ws:; frame-ancestors 'none'"
)


class WebTop(Server):
    """Serves ``command``, which runs the application, to visitors with the secret.

    ``command`` may begin with variables, as for ``env``.
    """

    def __init__(self, command: Sequence[str], port: int, say: Callable[[str], None]) -> None:
        # The application draws with Unicode, whatever the locale of this process is. The library
        # starts a shell, which the application replaces: it then is a child of this process.
        text = "exec " + shlex.join(["env", "PYTHONUTF8=1", *command])
        super().__init__(text, HOST, port, title="gpupool top", public_url=f"http://{HOST}:{port}")
        self.secret = secrets.token_urlsafe(24)
        self._say = say
        self._pages: set[asyncio.Task[Any]] = set()

    @property
    def address(self) -> str:
        return f"{self.public_url}/?{_SECRET}={self.secret}"

    async def on_startup(self, app: web.Application) -> None:
        """Say nothing: the server does not listen yet."""

    def serve(self, debug: bool = False) -> None:
        """Serve until Ctrl+C or SIGTERM, and say where to look when the server listens."""
        text = f"open {self.address} (Ctrl+C ends the server)"
        web.run_app(self._make_app(), host=HOST, port=self.port, print=lambda *_: self._say(text))

    async def _make_app(self) -> web.Application:
        """Return the library's application behind the check of visitors."""
        app = await super()._make_app()
        app.middlewares.append(self._check)
        return app

    @web.middleware
    async def _check(self, request: web.Request, handler: Any) -> web.StreamResponse:
        """Refuse visitors without the secret, and pages of other sites."""
        own = f"{HOST}:{self.port}"
        if request.host != own or request.headers.get("Origin", f"http://{own}") != f"http://{own}":
            return web.Response(status=403, text=f"open http://{own}/ with the printed secret\n")
        given = request.query.get(_SECRET)
        if request.path == "/" and given is not None and self._is_secret(given):
            answer = web.Response(
                status=303, headers={"Location": "/", "Cache-Control": "no-store"}
            )
            answer.set_cookie(_COOKIE, self.secret, httponly=True, samesite="Strict", path="/")
            return answer
        if not self._is_secret(request.cookies.get(_COOKIE, "")):
            return web.Response(
                status=403, text="open the address that `gpupool top --web` printed\n"
            )
        response: web.StreamResponse = await handler(request)
        if not response.prepared:  # a socket's headers have been sent
            response.headers["Content-Security-Policy"] = _POLICY
            response.headers["Referrer-Policy"] = "no-referrer"
        return response

    def _is_secret(self, text: str) -> bool:
        return secrets.compare_digest(text.encode(), self.secret.encode())

    async def handle_websocket(self, request: web.Request) -> web.WebSocketResponse:
        """Run the application for a page, unless too many pages are open."""
        if len(self._pages) >= _MAX_PAGES:
            raise web.HTTPTooManyRequests(text=f"{_MAX_PAGES} pages are open: close one\n")
        page = asyncio.current_task()
        assert page is not None
        self._pages.add(page)
        try:
            return await super().handle_websocket(request)
        finally:
            self._pages.discard(page)

    async def on_shutdown(self, app: web.Application) -> None:
        """End the open pages, which the server would wait for."""
        for page in self._pages:
            page.cancel()


def serve(command: Sequence[str], port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl+C or SIGTERM. Raises OSError: the port is taken."""
    WebTop(command, port, say).serve()
