"""Bounds on the structure of a JSON text, counted on arrival.

A parser's time and memory depend on the number of values rather than of bytes, and a parser cannot
be interrupted: 10 MB of ``[[],[],...`` block an event loop for most of a second, 10 MB of one
string for some milliseconds. The scan does not parse: strings are cut out, and the rest is counted
piece by piece.
"""

from __future__ import annotations

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


class TooMuchJson(Exception):
    """A JSON text exceeds a bound; the message names the bound."""


class JsonScan:
    """Counts the values of one JSON text. For other texts the counts are meaningless."""

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
