"""The daemon's events, the newest at the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.numbers import clock
from gpupool_tui.table import TableColumn, plain
from gpupool_tui.text import Line, Span
from gpupool_tui.view import View
from gpupoold.domain import Event
from gpupoold.printable import clean

_LEVELS = {"info": ("info", "dim"), "warning": ("warn", "warn"), "error": ("ERROR", "bad")}


def key_of(event: Event) -> str:
    """Return an event's key for selection."""
    return str(event.id)


def _message(event: Event, view: View, width: int) -> Line:
    return (Span(clean(event.message), "bad" if event.level == "error" else ""),)


COLUMNS: Sequence[TableColumn[Event]] = (
    TableColumn("time", "TIME", 8, lambda one, view, _: (Span(clock(one.at, view.zone), "dim"),)),
    TableColumn("level", "LEVEL", 5, lambda one, *_: (Span(*_LEVELS[one.level]),)),
    TableColumn("kind", "WHAT", 14, plain(lambda one: one.kind, "bold"), grows=6),
    TableColumn("subject", "OF", 8, plain(lambda one: one.subject), rank=1, grows=12),
    TableColumn("message", "MESSAGE", 24, _message, grows=200),
)
