"""Pieces of lines with styles; widths are in cells of a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len as cell_len, set_cell_size

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"


class Span(NamedTuple):
    """Text in one style: words of the palette separated by spaces, none for plain text."""

    text: str
    style: str = ""


Line = tuple[Span, ...]


def width_of(line: Iterable[Span]) -> int:
    return sum(cell_len(span.text) for span in line)


def fit(text: str, width: int, *, right: bool = False) -> str:
    """Return ``text`` in exactly ``width`` cells: padded, or cut with an ellipsis at its end."""
    length = cell_len(text)
    if length == width:
        return text
    if length > width:
        return set_cell_size(text, width - 1) + ELLIPSIS if width > 1 else ELLIPSIS[:width]
    return " " * (width - length) + text if right else text + " " * (width - length)


def fit_line(line: Sequence[Span], width: int) -> Line:
    """A line in exactly ``width`` cells."""
    kept: list[Span] = []
    left = width
    for span in line:
        length = cell_len(span.text)
        if length > left:
            if left:
                is_blank = not span.text.strip()
                kept.append(Span(" " * left if is_blank else fit(span.text, left), span.style))
            return tuple(kept)
        if length:
            kept.append(span)
            left -= length
    if left:
        kept.append(Span(" " * left))
    return tuple(kept)


def restyled(line: Iterable[Span], style: str) -> Line:
    """Return a line with an additional style."""
    return tuple(Span(text, f"{own} {style}".strip()) for text, own in line)


def as_ascii(line: Iterable[Span]) -> Line:
    """Return a line for an ASCII terminal, with question marks for other characters."""
    return tuple(Span(_ascii(text), style) for text, style in line)


def plain(line: Iterable[Span]) -> str:
    """Return the text of a line without trailing padding."""
    return "".join(span.text for span in line).rstrip()


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    return "".join(one if one.isascii() else _substitute(one) for one in text)


def _substitute(character: str) -> str:
    return "~" if character == ELLIPSIS else "?" * cell_len(character)
