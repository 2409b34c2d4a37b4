"""Cross-origin access of web pages (CORS), by Starlette's middleware.

The middleware is in front of the router: a preflight has no key, and an error before the model's
API needs the headers too, or a page would see a network error instead of the message.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import Protocol
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware

from gpupoold.frontend.client_answer import FACT_HEADERS
from gpupoold.frontend.errors import ApiError, short
from gpupoold.frontend.mounts import AsgiApp, Receive, Scope, Send

_METHODS = ("DELETE", "GET", "HEAD", "POST")
_EXPOSED = ("retry-after", "x-request-id", *FACT_HEADERS)
_MAX_AGE_S = 600

ANY_ORIGIN = "*"

Headers = Iterable[tuple[bytes, bytes]]


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
        return not all(is_allowed(origin.decode("latin-1"), self._permitted) for origin in origins)


class Permitted(Protocol):
    """The names and origins of the configuration.

    A page of another site can make a visitor's browser send requests to a loopback address:
    directly, with the page's ``Origin``, or as the page's own site after its name has been pointed
    at 127.0.0.1 (DNS rebinding), with that name as ``Host``. Neither can send an unknown key.
    """

    host_names: frozenset[str]
    allowed_origins: frozenset[str]


def check_host(headers: Headers, permitted: Permitted) -> None:
    """Check that a request was meant for this server.

    ``Host`` must be a loopback address, ``localhost`` or one of ``host_names`` (lower case). A
    request without ``Host`` (HTTP/1.0) does not come from a browser.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"host" and not _is_ours(f"//{text}", permitted.host_names):
            raise ApiError(
                421,
                f"The Host header is {short(text)!r}, which this server does not answer without an "
                "API key. Use localhost or 127.0.0.1, or name the host in access.host_names.",
            )


def check_origin(headers: Headers, permitted: Permitted) -> None:
    """Check that a request was not sent by another site's page.

    The host of ``Origin``, if present, must be as for :func:`check_host`, or the origin one of
    ``allowed_origins``. Origins of schemes other than HTTP belong to desktop programs and are
    accepted.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name != b"origin" or not _is_of_a_page(text) or is_allowed(text, permitted):
            continue
        if not _is_ours(text, permitted.host_names):
            raise ApiError(
                403,
                f"The Origin header is {short(text)!r}: pages of other sites have no access "
                "without an API key. To give the pages of an origin access, add it to "
                "access.allowed_origins.",
            )


def is_allowed(origin: str, permitted: Permitted) -> bool:
    """Return whether the configuration gives pages of this origin access."""
    return origin in permitted.allowed_origins or ANY_ORIGIN in permitted.allowed_origins


def _is_of_a_page(origin: str) -> bool:
    """Return whether a page can have this origin; ``null`` belongs to a sandboxed page."""
    scheme, found, _ = origin.partition("://")
    return not found or scheme.lower() in ("http", "https")


def _is_ours(url: str, host_names: Collection[str]) -> bool:
    try:
        host = (urlsplit(url).hostname or "").removesuffix(".")
    except ValueError:
        return False
    if host == "localhost" or host.endswith(".localhost") or host in host_names:
        return True
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
