"""Pieces of lines with styles, the characters of bars, and short forms of numbers.

Widths are in cells of a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo
from typing import NamedTuple

from rich.cells import cell_len as cell_len, set_cell_size

from gpupoold.units import format_duration

ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"

NOTHING = "-"
_UNITS = ("B", "K", "M", "G", "T")


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
    return "".join(span.text for span in line).rstrip()


def _ascii(text: str) -> str:
    if text.isascii():
        return text
    text = text.replace(ELLIPSIS, "~")
    return "".join(char if char.isascii() else "?" * cell_len(char) for char in text)


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters of one cell each; ``levels`` go from least to most."""

    is_ascii: bool = False
    weights: str = "█"
    prefetched: str = "▓"
    kv: str = "▒"
    free: str = "·"
    other: str = "▚"
    gauge: str = "━"
    rest: str = "─"
    run: str = "━"
    switch: str = "▒"
    idle: str = "·"
    tick: str = "┴"
    rule: str = "─"
    up: str = "▲"
    down: str = "▼"
    cursor: str = "▸"
    dot: str = "●"
    separator: str = "·"
    levels: str = "▁▂▃▄▅▆▇█"
    nothing: str = "·"
    late: str = "!"


UNICODE = Glyphs()
ASCII = Glyphs(
    is_ascii=True,
    weights="#",
    prefetched="+",
    kv="=",
    free=".",
    other="?",
    gauge="=",
    rest="-",
    run="=",
    switch="%",
    idle=".",
    tick="+",
    rule="-",
    up="^",
    down="v",
    cursor=">",
    dot="*",
    separator="-",
    levels="_.-:=+*#",
    nothing=" ",
)


def duration(seconds: float | None) -> str:
    """As ``1.25s`` or ``340ms``; five cells at most below 10,000 hours."""
    return NOTHING if seconds is None else format_duration(max(0.0, seconds))


def size(num_bytes: float) -> str:
    """Binary units with three digits: ``14.2G``, ``512M``, ``0``."""
    if num_bytes <= 0:
        return "0"
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:
            return f"{num_bytes:.3g}{unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g}{_UNITS[-1]}" if num_bytes < 999.5 else f"{num_bytes:.0f}{_UNITS[-1]}"


def count(number: float) -> str:
    """Counts and rates: ``0``, ``9.5``, ``240``, ``12.4k``, ``3.1M``."""
    if number < 10 and number != int(number):
        return f"{number:.1f}"
    if number < 9_999.5:
        return f"{number:.0f}"
    for unit in ("k", "M"):
        number /= 1000
        if number < 999.5:
            return f"{number:.3g}{unit}"
    return f"{number / 1000:.3g}G"


def percent(share: float | None) -> str:
    """``97.5``; ``100`` only where all is in time, three digits at most."""
    if share is None:
        return NOTHING
    hundred = 100 * share
    if hundred >= 99.95:
        return "100" if share >= 1 else "99.9"
    return f"{hundred:.1f}"


def uptime(seconds: float) -> str:
    """``45s``, ``12m``, ``3h 05m``, ``9d 4h``."""
    minutes, hours = int(seconds // 60), int(seconds // 3600)
    if minutes < 1:
        return f"{int(seconds)}s"
    if hours < 1:
        return f"{minutes}m"
    if hours < 48:
        return f"{hours}h {minutes % 60:02}m"
    return f"{hours // 24}d {hours % 24}h"


def clock(at: float, zone: tzinfo | None) -> str:
    return datetime.fromtimestamp(at, zone).strftime("%H:%M:%S")


def ranges(numbers: Iterable[int]) -> str:
    """``0-2,5`` for 0, 1, 2 and 5."""
    return ",".join(_ranges(sorted(set(numbers))))


def _ranges(numbers: list[int]) -> Iterator[str]:
    start = 0
    for index, number in enumerate(numbers):
        is_last = index + 1 == len(numbers)
        if is_last or numbers[index + 1] != number + 1:
            first = numbers[start]
            yield f"{first}" if first == number else f"{first}-{number}"
            start = index + 1
