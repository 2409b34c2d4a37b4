"""The daemon's events, the newest at the bottom."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.numbers import clock
from gpupool_tui.table import TableColumn
from gpupool_tui.text import Line, Span
from gpupool_tui.view import View
from gpupoold.domain import Event
from gpupoold.printable import clean

_LEVELS = {"info": ("info", "dim"), "warning": ("warn", "warn"), "error": ("ERROR", "bad")}


def key_of(event: Event) -> str:
    """Return an event's key for selection."""
    return str(event.id)


def _time(event: Event, view: View, width: int) -> Line:
    return (Span(clock(event.at, view.zone), "dim"),)


def _level(event: Event, view: View, width: int) -> Line:
    text, style = _LEVELS[event.level]
    return (Span(text, style),)


def _kind(event: Event, view: View, width: int) -> Line:
    return (Span(clean(event.kind), "bold"),)


def _subject(event: Event, view: View, width: int) -> Line:
    return (Span(clean(event.subject)),)


def _message(event: Event, view: View, width: int) -> Line:
    return (Span(clean(event.message), "bad" if event.level == "error" else ""),)


COLUMNS: Sequence[TableColumn[Event]] = (
    TableColumn("time", "TIME", 8, _time),
    TableColumn("level", "LEVEL", 5, _level),
    TableColumn("kind", "WHAT", 14, _kind, grows=6),
    TableColumn("subject", "OF", 8, _subject, rank=1, grows=12),
    TableColumn("message", "MESSAGE", 24, _message, grows=200),
)
