"""Checks of ``Host`` and ``Origin`` for requests without an API key. Pure.

A page of another site can make a visitor's browser send requests to a loopback address: directly,
with the page's ``Origin``, or as the page's own site after its name has been pointed at 127.0.0.1
(DNS rebinding), with that name as ``Host``. Neither can send an unknown key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from typing import Protocol
from urllib.parse import urlsplit

from gpupoold.frontend.errors import foreign_origin, misdirected

ANY_ORIGIN = "*"

Headers = Iterable[tuple[bytes, bytes]]


class Permitted(Protocol):
    """The names and origins of the configuration."""

    host_names: frozenset[str]
    allowed_origins: frozenset[str]


def check_host(headers: Headers, permitted: Permitted) -> None:
    """Check that a request was meant for this server.

    ``Host`` must be a loopback address, ``localhost`` or one of ``host_names`` (lower case). A
    request without ``Host`` (HTTP/1.0) does not come from a browser.

    Raises:
        ApiError: 421.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"host" and not _is_ours(f"//{text}", permitted.host_names):
            raise misdirected(text)


def check_origin(headers: Headers, permitted: Permitted) -> None:
    """Check that a request was not sent by another site's page.

    The host of ``Origin``, if present, must be as for :func:`check_host`, or the origin one of
    ``allowed_origins``. Origins of schemes other than HTTP belong to desktop programs and are
    accepted.

    Raises:
        ApiError: 403.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name != b"origin" or not _is_of_a_page(text) or is_allowed(text, permitted):
            continue
        if not _is_ours(text, permitted.host_names):
            raise foreign_origin(text)


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
