"""The whole screen as lines of text with styles. Pure: the same for a terminal and for a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool_tui import devices_panel, models_panel, requests_panel
from gpupool_tui.frame import footer, header, title_line
from gpupool_tui.lanes import axis, draw_lane
from gpupool_tui.layout import share_out, wishes
from gpupool_tui.numbers import clock, duration
from gpupool_tui.picture import Picture
from gpupool_tui.table import DrawnTable, TableColumn, draw_table, plain, sort_rows, window
from gpupool_tui.text import Line, Span, as_ascii, fit, fit_line, restyled
from gpupool_tui.view import Panel, View
from gpupoold.api.schemas import DeviceInfo
from gpupoold.domain import Event
from gpupoold.units import clean

_LANE_LEFT = 5
_LANE_RIGHT = 6

_LEVELS = {"info": ("info", "dim"), "warning": ("warn", "warn"), "error": ("ERROR", "bad")}


@dataclass(frozen=True, slots=True)
class Screen:
    """The screen's content: each panel's lines, and the keys of rows by line."""

    lines: list[Line]
    places: dict[Panel, range]
    rows: dict[int, tuple[Panel, str]]

    @property
    def visible(self) -> frozenset[Panel]:
        """The panels on the screen."""
        return frozenset(self.places)


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


@dataclass(frozen=True, slots=True)
class PanelTable:
    """A table's columns, its rows in order, and the rows' keys."""

    columns: Sequence[TableColumn[Any]]
    rows: Sequence[Any]
    key_of: Callable[[Any], str]
    num_all: int

    @property
    def keys(self) -> list[str]:
        return [self.key_of(row) for row in self.rows]


def tables(picture: Picture, view: View) -> dict[Panel, PanelTable]:
    """Return the rows of every table in order, without filtered ones."""
    wanted, top = view.filter.lower(), picture.latest

    def rows(
        panel: Panel, every: Sequence[Any], columns: Any, key_of: Any, text: Any
    ) -> PanelTable:
        kept = [row for row in every if not wanted or wanted in text(row).lower()]
        ordered = sort_rows(kept, columns, view.sorting.get(panel))
        num_all = len(every)
        if panel is Panel.REQUESTS:
            num_all = max(num_all, top.status.num_live_requests)
        return PanelTable(columns, ordered, key_of, num_all)

    return {
        Panel.DEVICES: rows(
            Panel.DEVICES,
            top.devices,
            devices_panel.COLUMNS,
            devices_panel.key_of,
            lambda one: wanted,  # a name contains no device
        ),
        Panel.MODELS: rows(
            Panel.MODELS,
            top.models,
            models_panel.columns(picture),
            models_panel.key_of,
            lambda one: one.usage.name,
        ),
        Panel.REQUESTS: rows(
            Panel.REQUESTS,
            top.requests,
            requests_panel.COLUMNS,
            requests_panel.key_of,
            lambda one: f"{one.request_id} {one.model}",
        ),
        Panel.EVENTS: rows(
            Panel.EVENTS,
            list(picture.events),
            COLUMNS,
            key_of,
            lambda one: f"{one.kind} {one.subject} {one.message}",
        ),
    }


def compose(picture: Picture, view: View, width: int, height: int) -> Screen:
    """``height`` lines of ``width`` cells."""
    all_tables = tables(picture, view)
    wanted = wishes(*(all_tables[panel].num_all for panel in _COUNTED))
    heights = share_out(wanted, height - 2, view.maximised)
    lines: list[Line] = [header(picture, view, width)]
    places: dict[Panel, range] = {}
    rows: dict[int, tuple[Panel, str]] = {}
    for panel, count in heights.items():
        first = len(lines)
        places[panel] = range(first, first + count)
        drawn, keys = _panel(panel, picture, view, all_tables, width, count)
        above = 1 if panel is Panel.LANES else 2
        owner = Panel.DEVICES if panel is Panel.LANES else panel
        rows |= {first + above + index: (owner, key) for index, key in enumerate(keys)}
        lines += drawn
    body = [restyled(line, "lost") for line in lines[1:]] if view.lost else lines[1:]
    lines = [lines[0], *body]
    lines += [(Span(" " * width),)] * (height - 1 - len(lines))
    hidden = [] if view.maximised else [panel for panel in Panel if panel not in heights]
    lines.append(footer(view, hidden, width))
    if view.glyphs.is_ascii:
        lines = [as_ascii(line) for line in lines]
    return Screen(lines[:height], places, rows)


_COUNTED = (Panel.DEVICES, Panel.MODELS, Panel.REQUESTS, Panel.EVENTS)


def _panel(
    panel: Panel,
    picture: Picture,
    view: View,
    all_tables: dict[Panel, PanelTable],
    width: int,
    height: int,
) -> tuple[list[Line], list[str]]:
    if panel is Panel.LANES:
        return _lanes(picture, view, width, height)
    table = all_tables[panel]
    drawn = draw_table(
        table.columns,
        table.rows,
        table.key_of,
        view,
        view.sorting.get(panel),
        view.selected.get(panel),
        width,
        height - 1,
        at_end=panel is Panel.EVENTS,
    )
    legend = devices_panel.legend(view) if panel is Panel.DEVICES else ()
    notes = _notes(panel, table, drawn, view)
    if panel is Panel.MODELS:
        notes[1:1] = models_panel.pause_notes(picture.latest.models)
        notes += models_panel.addition_notes(picture.latest.additions)
    title = title_line(panel, view, notes, legend, width)
    return [title, *drawn.lines], drawn.keys


def _notes(panel: Panel, table: PanelTable, drawn: DrawnTable, view: View) -> list[str]:
    notes = []
    if view.filter and panel is not Panel.DEVICES:
        notes.append(f"{len(table.rows)} with {view.filter!r}")
    if len(drawn.keys) < table.num_all:
        notes.append(f"{len(drawn.keys)} shown of {table.num_all}")
    else:
        notes.append(str(table.num_all))
    if drawn.left_out:
        notes.append("no room for " + ", ".join(drawn.left_out))
    return notes


def _lanes(picture: Picture, view: View, width: int, height: int) -> tuple[list[Line], list[str]]:
    glyphs, zoom_s = view.glyphs, view.zoom_s
    cells = max(1, width - _LANE_LEFT - _LANE_RIGHT)
    devices = sorted(picture.latest.devices, key=lambda one: one.device)
    numbers = [str(device.device) for device in devices]
    selected = view.selected.get(Panel.DEVICES, "")
    index = numbers.index(selected) if selected in numbers else 0
    shown = window(len(devices), height - 2, index)
    lines = [_lane(picture, devices[i], view, cells, width) for i in shown]
    below = axis(zoom_s, cells, glyphs)
    lines += [(Span(" " * width),)] * (height - 2 - len(lines))
    lines.append(fit_line((Span(" " * _LANE_LEFT), Span(below, "dim")), width))
    notes = [f"{duration(zoom_s)} a cell", f"{duration(cells * zoom_s)} in all"]
    if len(shown) < len(devices):
        notes.append(f"{len(shown)} shown of {len(devices)}")
    legend = (Span(glyphs.switch, "switch"), Span(" switch; right: share of time", "dim"))
    title = title_line(Panel.LANES, view, notes, legend, width)
    return [title, *lines], [numbers[i] for i in shown]


def _lane(picture: Picture, device: DeviceInfo, view: View, cells: int, width: int) -> Line:
    lane = draw_lane(picture.cells(device, view.zoom_s, cells), view.glyphs)
    share = f"{100 * lane.switch_share:4.0f}%"
    style = "warn" if lane.switch_share > 0.25 else "dim"
    left = Span(fit(str(device.device), _LANE_LEFT - 1, right=True) + " ", "bold")
    return fit_line((left, *lane.line, Span(f" {share}", style)), width)
