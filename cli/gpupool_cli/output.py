"""The only writer of stdout: tables, fields and JSON.

Tables are drawn and coloured on a terminal and plain aligned text elsewhere;
``NO_COLOR`` is respected.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TypeVar

from pydantic_core import to_jsonable_python
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gpupoold.durations import Lateness
from gpupoold.errors import UsageError
from gpupoold.units import clean, format_bytes, format_duration, without_controls

NOTHING = "-"
_GAP = "  "
_UNESCAPED_CONTROLS = re.compile("[\x7f-\x9f]")
_STYLES = {
    "ready": "green",
    "host": "green",
    "running": "green",
    "loading": "yellow",
    "draining": "yellow",
    "starting": "yellow",
    "stopping": "yellow",
    "ok": "green",
    "fault": "red",
    "failed": "red",
    "warning": "yellow",
    "error": "red",
}

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Column:
    """A table's column; numbers stand to the right, states have colours."""

    title: str
    right: bool = False
    coloured: bool = False


def columns(titles: str) -> tuple[Column, ...]:
    """Return the columns of a list such as ``NAME, STATE*, SIZE>``: ``>`` right, ``*`` coloured."""
    return tuple(
        Column(title.rstrip(">*"), right=">" in title, coloured="*" in title)
        for title in titles.split(", ")
    )


def print_line(text: str) -> None:
    print(without_controls(text), flush=True)


def print_piece(text: str) -> None:
    """Print and flush a piece of a line, on a terminal without control characters."""
    print(without_controls(text) if sys.stdout.isatty() else text, end="", flush=True)


def print_json(value: object) -> None:
    """Print a body of the admin API, a list of bodies or a mapping."""
    print(_as_json(value, indent=2))


def print_json_line(value: object) -> None:
    """Print and flush one line of an NDJSON stream."""
    print(_as_json(value), flush=True)


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """``rows`` under the columns' titles."""
    rows = [[clean(cell.replace("\n", " ")) for cell in row] for row in rows]
    if not sys.stdout.isatty():
        for line in aligned(columns, rows):
            print(line)
        return
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        table.add_column(column.title, justify="right" if column.right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*map(_cell, columns, row))
    # The terminal wraps a table that is too wide, so that no text is cut off.
    needed = max(map(len, aligned(columns, rows))) + len(_GAP)
    _terminal(width=max(needed, _terminal().width)).print(table)


def show_live(lines: Callable[[], Sequence[str]], interval_s: float) -> None:
    """Show the lines on the whole terminal, anew at each interval, until interrupted.

    Elsewhere the lines are printed once.
    """
    if not sys.stdout.isatty():
        for line in lines():
            print_line(line)
        return
    console = _terminal()
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            shown = [clean(line) for line in lines()][: console.height]
            live.update(Text("\n".join(shown), no_wrap=True, overflow="crop"), refresh=True)
            time.sleep(interval_s)


def print_fields(fields: Mapping[str, str]) -> None:
    """Print a record: one ``name value`` per line, values aligned."""
    width = max(map(len, fields))
    for name, value in fields.items():
        shown = without_controls(value).replace("\n", f"\n{_GAP:<{width + len(_GAP)}}")
        print(f"{name:<{width}}{_GAP}{shown}".rstrip())


def print_styled(parts: Sequence[str], style_of: str) -> None:
    """Print ``parts`` on one line; on a terminal in the colour of the word ``style_of``."""
    line = clean(" ".join(parts))
    if sys.stdout.isatty():
        text = Text(line, style=_STYLES.get(style_of, ""))
        _terminal().print(text, soft_wrap=True)
    else:
        print_line(line)


def aligned(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """The table as text lines, columns two spaces apart."""
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    return [
        _GAP.join(
            f"{cell:>{width}}" if column.right else f"{cell:<{width}}"
            for column, cell, width in zip(columns, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def size_text(num_bytes: int) -> str:
    return format_bytes(num_bytes) if num_bytes else NOTHING


def unbound_text(num_bytes: Mapping[int, int]) -> str:
    """Return the weights that stay on devices without an engine."""
    places = (f"{format_bytes(size)} on device {number}" for number, size in num_bytes.items())
    return ", ".join(places)


def duration_text(seconds: float | None) -> str:
    return NOTHING if seconds is None else format_duration(seconds)


def lateness_text(lateness: Lateness) -> str:
    """Return the causes with their seconds, an empty text without lateness."""
    causes = lateness.by_name().items()
    return ", ".join(f"{cause} {format_duration(late_s)}" for cause, late_s in causes if late_s)


def time_text(timestamp_s: float) -> str:
    """A moment (seconds since the epoch) in local time."""
    return datetime.fromtimestamp(timestamp_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _terminal(width: int | None = None) -> Console:
    return Console(file=sys.stdout, width=width, markup=False, highlight=False, emoji=False)


def _cell(column: Column, text: str) -> Text:
    return Text(text, style=_STYLES.get(text, "") if column.coloured else "")


def _as_json(value: object, indent: int | None = None) -> str:
    """Return JSON safe for a terminal: JSON escapes C0 itself, but neither DEL nor C1."""
    text = json.dumps(to_jsonable_python(value), ensure_ascii=False, indent=indent)
    return _UNESCAPED_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def names(text: str) -> tuple[str, ...]:
    """Return the names without surrounding space."""
    return tuple(part.strip() for part in text.split(","))


def numbers(option: str, text: str, kind: type[N], example: str) -> tuple[N, ...]:
    """Return the numbers in ``text``, the value of ``option``; ``example`` shows the form.

    Raises UsageError: the message names the option.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        problem = f"{option}: {text!r} is not a list of {what}"
        raise UsageError(problem, f"write for example {example}") from None
