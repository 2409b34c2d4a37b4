"""Reading of HTTP request bodies, bounded in size, time and structure."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import MutableMapping
from typing import Any

from gpupoold.frontend.errors import ApiError, bad_request, too_large
from gpupoold.frontend.in_flight import BodyHolding
from gpupoold.frontend.mounts import Receive, Scope

BODY_TIMEOUT_S = 60.0
_STRETCH_BYTES = 16_384
_BETWEEN_STRETCHES_S = 0.002

MAX_CONTAINERS = 5_000
"""Limit of objects and arrays, the most expensive values: a message has one, a tool three and
its schema.
"""
MAX_STRINGS = 50_000
"""The names of fields are strings too."""
MAX_VALUES = 310_000
"""Limit of all values: enough for 300,000 token ids, OpenAI's limit of one request to embed."""
MAX_DEPTH = 100

_KEPT = b"[]{},"
_NOT_STRUCTURE = bytes(set(range(256)) - set(_KEPT))
_OPENING = frozenset(b"[{")


class Disconnected(Exception):
    """The client disconnected while its request was being read."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, holding: BodyHolding) -> bytes:
    """Read a JSON body, whose bytes are counted in ``holding``.

    Raises:
        ApiError: 400, 408, 413 or 429: the body has too many values, does not arrive in time, or is
            too large in itself or beside other requests.
        Disconnected: the client disconnected.
    """
    if declared_length(scope) > max_bytes:
        raise too_large(max_bytes)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _join(receive, max_bytes, holding)
    except TimeoutError:
        text = f"The request body has not come within {BODY_TIMEOUT_S:g} s."
        raise ApiError(408, text) from None
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


def declared_length(scope: Scope) -> int:
    """Return the length in the headers of a request, 0 without."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0


class TooMuchJson(Exception):
    """A JSON text exceeds a bound; the message names the bound."""


class JsonScan:
    """Counts the values of one JSON text. For other texts the counts are meaningless.

    A parser's time and memory depend on the number of values rather than of bytes, and a parser
    cannot be interrupted: 10 MB of ``[[],[],...`` block an event loop for most of a second, 10 MB
    of one string for some milliseconds. The scan does not parse: strings are cut out, and the rest
    is counted piece by piece.
    """

    def __init__(self) -> None:
        self.num_containers = 0
        self.num_strings = 0
        self.num_values = 1
        self._depth = 0
        self._is_in_string = False
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Count the next piece of the text.

        Raises:
            TooMuchJson: the text so far exceeds a bound.
        """
        outside = self._outside_strings(piece).translate(None, _NOT_STRUCTURE)
        num_commas = outside.count(b",")
        num_opened = outside.count(b"[") + outside.count(b"{")
        self.num_containers += num_opened
        self.num_values += num_commas + num_opened
        _check(self.num_containers, MAX_CONTAINERS, "objects and arrays")
        _check(self.num_strings, MAX_STRINGS, "strings, names of fields among them")
        _check(self.num_values, MAX_VALUES, "values")
        for byte in outside.translate(None, b","):
            if self._depth < 0:
                break  # more closed than opened: the parser refuses the body
            self._depth += 1 if byte in _OPENING else -1
            if self._depth > MAX_DEPTH:
                raise TooMuchJson(f"The request body is nested more than {MAX_DEPTH} levels deep.")

    def _outside_strings(self, piece: bytes) -> bytes:
        text = self._rest + piece
        # A backslash escapes the next character, which may be in the next piece.
        num_backslashes = len(text) - len(text.rstrip(b"\\"))
        self._rest = b"\\" if num_backslashes % 2 else b""
        if self._rest:
            text = text[:-1]
        if b"\\" in text:
            text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = text.split(b'"')
        outside = parts[1::2] if self._is_in_string else parts[::2]
        num_quotes = len(parts) - 1
        self.num_strings += (num_quotes + (not self._is_in_string)) // 2
        self._is_in_string ^= bool(num_quotes % 2)
        return b"".join(outside)


def _check(number: int, bound: int, what: str) -> None:
    if number > bound:
        raise TooMuchJson(f"The request body has more than {bound:,} {what}.")
