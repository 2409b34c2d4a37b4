"""Reading of HTTP request bodies, bounded in size, time and structure."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import MutableMapping
from typing import Any

from gpupoold.frontend.errors import bad_request, too_large, too_slow
from gpupoold.frontend.in_flight import BodyHolding
from gpupoold.frontend.json_scan import JsonScan, TooMuchJson
from gpupoold.frontend.mounts import Receive, Scope

BODY_TIMEOUT_S = 60.0
_STRETCH_BYTES = 16_384
_BETWEEN_STRETCHES_S = 0.002


class Disconnected(Exception):
    """The client disconnected while its request was being read."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, holding: BodyHolding) -> bytes:
    """Read a JSON body, whose bytes are counted in ``holding``.

    Raises:
        ApiError: 400, 408, 413 or 429: the body has too many values, does not arrive in time, or is
            too large in itself or beside other requests.
        Disconnected: the client disconnected.
    """
    if _declared_length(scope) > max_bytes:
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _join(receive, max_bytes, holding)
    except TimeoutError:
        raise too_slow(BODY_TIMEOUT_S) from None
    except TooMuchJson as error:
        raise bad_request(str(error)) from None


async def _join(receive: Receive, max_bytes: int, holding: BodyHolding) -> bytes:
    pieces: list[bytes] = []
    num_bytes, scan = 0, JsonScan()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        piece = message.get("body", b"")
        num_bytes += len(piece)
        if num_bytes > max_bytes:
            raise too_large(max_bytes)
        holding.add(len(piece))
        scan.feed(piece)
        pieces.append(piece)
        if not message.get("more_body"):
            return b"".join(pieces)


async def let_others_run(num_bytes: int) -> None:
    """Suspend the task between two stretches of work on a request, if it has many bytes.

    A chunk of another stream passes through several tasks, so one turn of the event loop would not
    be enough.
    """
    if num_bytes > _STRETCH_BYTES:
        await asyncio.sleep(_BETWEEN_STRETCHES_S)


def without_bom(body: bytes) -> bytes:
    """Return a body without UTF-8's byte order mark, which editors of Windows write."""
    return body.removeprefix(codecs.BOM_UTF8)


def replay(body: bytes, receive: Receive) -> Receive:
    """``receive`` for the application: the body once, then the client's own messages."""
    unread = [body]

    async def receive_again() -> MutableMapping[str, Any]:
        if not unread:
            return await receive()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return receive_again


def _declared_length(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
