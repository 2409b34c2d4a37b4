"""Cross-origin access of web pages (CORS), by Starlette's middleware.

The middleware is in front of the router: a preflight has no key, and an error before the model's
API needs the headers too, or a page would see a network error instead of the message.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.middleware.cors import CORSMiddleware

from gpupoold.frontend.client_answer import FACT_HEADERS
from gpupoold.frontend.mounts import AsgiApp, Receive, Scope, Send
from gpupoold.frontend.origins import Permitted, is_allowed

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_EXPOSED = ("retry-after", "x-request-id", *FACT_HEADERS)
_MAX_AGE_S = 600


class Cors:
    """An ASGI application around ``app``; ``permitted`` may change at any time."""

    def __init__(self, app: AsgiApp, permitted: Permitted) -> None:
        self._app = app
        self._permitted = permitted
        self._origins: Collection[str] = ()
        self._middleware: AsgiApp = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the preflight of an allowed origin; else pass the request on."""
        if self._permitted.allowed_origins != self._origins:
            self._build(self._permitted.allowed_origins)
        app = self._app if self._is_foreign_preflight(scope) else self._middleware
        await app(scope, receive, send)

    def _build(self, origins: Collection[str]) -> None:
        self._origins = origins
        self._middleware = self._app
        if origins:
            self._middleware = CORSMiddleware(
                self._app,
                allow_origins=origins,
                allow_methods=_METHODS,
                # Every header that the page asks for: clients send many of their own, and none
                # has an effect that a page must not have.
                allow_headers=("*",),
                allow_private_network=True,
                expose_headers=_EXPOSED,
                max_age=_MAX_AGE_S,
            )

    def _is_foreign_preflight(self, scope: Scope) -> bool:
        """Return whether the router should answer, whose refusal names the setting."""
        if scope["method"] != "OPTIONS":
            return False
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        return not all(is_allowed(one.decode("latin-1"), self._permitted) for one in origins)
