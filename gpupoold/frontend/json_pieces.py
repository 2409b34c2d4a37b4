"""JSON answers in pieces, so that other streams go on between two pieces.

A serialiser in C or Rust holds the interpreter's lock for the whole of a value: 13 MB take it up to
a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

_PIECE_BYTES = 65_536
_NUM_ITEMS = 16
"""Items of a list that are serialised in one call; an item has up to some hundred values."""
_NUM_NUMBERS = 10_000


@dataclass(frozen=True, slots=True)
class Parts:
    """A list that is made while it is serialised, from lists that follow each other; once."""

    parts: Iterator[list[Any]]


class PiecewiseJson(JSONResponse):
    """An answer that is serialised while it is sent, in a thread, and in one piece if it is small.

    ``divided`` are the types of pydantic models whose fields may be long lists; all other models
    are serialised whole.
    """

    divided: frozenset[type] = frozenset()

    def render(self, content: Any) -> bytes:
        """Serialise the first piece."""
        self._further = _joined(json_pieces(content, self.divided))
        return next(self._further)

    def render_whole(self, content: Any) -> bytes:
        """Serialise in one piece, as vLLM does."""
        self._further = iter(())
        return super().render(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        second = next(self._further, None)
        if second is None:
            await super().__call__(scope, receive, send)
            return
        del self.headers["content-length"]
        headers = self.raw_headers
        await send({"type": "http.response.start", "status": self.status_code, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        piece: bytes | None = second
        while piece is not None:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
            piece = await asyncio.to_thread(next, self._further, None)
        await send({"type": "http.response.body", "body": b""})


def json_pieces(value: Any, divided: frozenset[type] = frozenset()) -> Iterator[bytes]:
    """Yield a value's JSON; a list or an object is divided, unless it is small.

    Models of the types ``divided`` must have no serialiser of their own.
    """
    if isinstance(value, BaseModel) and type(value) in divided:
        yield from _object_pieces(value, divided)
    elif isinstance(value, dict):
        yield from _object_pieces(value.items(), divided)
    elif isinstance(value, np.ndarray):
        yield from json_pieces(value.tolist(), divided)
    elif isinstance(value, Parts):
        yield from _bracketed(_joined_items(part, _NUM_ITEMS) for part in value.parts)
    elif isinstance(value, list) and value:
        yield from _list_pieces(value, divided)
    else:
        yield _whole(value)


def _object_pieces(items: Iterable[tuple[Any, Any]], divided: frozenset[type]) -> Iterator[bytes]:
    before = b"{"
    for name, value in items:
        yield before + _whole(str(name)) + b":"
        yield from json_pieces(value, divided)
        before = b","
    yield b"}" if before == b"," else b"{}"


def _list_pieces(values: list[Any], divided: frozenset[type]) -> Iterator[bytes]:
    if _is_nested(values[0], divided):
        yield from _bracketed(json_pieces(value, divided) for value in values)
    else:
        number = _NUM_NUMBERS if isinstance(values[0], int | float) else _NUM_ITEMS
        yield from _bracketed([_joined_items(values, number)])


def _bracketed(items: Iterable[Iterable[bytes]]) -> Iterator[bytes]:
    """Yield the pieces of an array, given the pieces of its items or of several of them."""
    before = b"["
    for pieces in items:
        yield before
        yield from pieces
        before = b","
    yield b"]" if before == b"," else b"[]"


def _joined_items(values: list[Any], number: int) -> Iterator[bytes]:
    """Yield the items of a list without brackets, ``number`` of them in each piece."""
    for begin in range(0, len(values), number):
        piece = _whole(values[begin : begin + number])[1:-1]
        yield b"," + piece if begin else piece


def _is_nested(value: Any, divided: frozenset[type]) -> bool:
    """Return whether the items of a list, of which ``value`` is the first, may be long."""
    if isinstance(value, dict):
        return any(
            isinstance(inner, list | np.ndarray) or type(inner) in divided
            for inner in value.values()
        )
    return isinstance(value, list) or type(value) in divided


def _whole(value: Any) -> bytes:
    return to_json(value, by_alias=False, inf_nan_mode="null")


def _joined(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Yield at least one piece, and pieces of at least ``_PIECE_BYTES`` except for the last."""
    waiting = bytearray()
    for piece in pieces:
        waiting += piece
        if len(waiting) >= _PIECE_BYTES:
            yield bytes(waiting)
            waiting.clear()
    yield bytes(waiting)
