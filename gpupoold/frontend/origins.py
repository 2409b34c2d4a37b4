"""Checks of ``Host`` and ``Origin`` for requests without an API key. Pure.

A page of another site can make a visitor's browser send requests to a loopback address: directly,
with the page's ``Origin``, or as the page's own site after its name has been pointed at 127.0.0.1
(DNS rebinding), with that name as ``Host``. Neither can send an unknown key.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from urllib.parse import urlsplit

from gpupoold.frontend.errors import foreign_origin, misdirected


def check_origin(headers: Iterable[tuple[bytes, bytes]], host_names: Collection[str]) -> None:
    """Check that a request was meant for this server, and not sent by another site's page.

    ``Host`` must be a loopback address, ``localhost`` or one of ``host_names`` (lower case); so
    must ``Origin``, if present. Origins of schemes other than HTTP belong to desktop programs and
    are accepted. A request without ``Host`` (HTTP/1.0) does not come from a browser.

    Raises:
        ApiError: 421 for the host, 403 for the origin.
    """
    for name, value in headers:
        text = value.decode("latin-1").strip()
        if name == b"host" and not _is_ours(f"//{text}", host_names):
            raise misdirected(text)
        if name == b"origin" and _is_of_a_page(text) and not _is_ours(text, host_names):
            raise foreign_origin(text)


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
