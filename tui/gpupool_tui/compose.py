"""The whole screen as lines of text with styles. Pure: the same for a terminal and for a test."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpupool_tui.lanes import axis, draw_lane
from gpupool_tui.panels import PanelTable, addition_notes, legend, pause_notes, tables
from gpupool_tui.picture import Picture
from gpupool_tui.table import DrawnTable, draw_table, window
from gpupool_tui.text import (
    Line,
    Span,
    as_ascii,
    clock,
    count,
    duration,
    fit,
    fit_line,
    restyled,
    size,
    uptime,
    width_of,
)
from gpupool_tui.view import Panel, View, share_out, wishes
from gpupoold.api.schemas import DeviceInfo, Top
from gpupoold.units import clean

_LANE_LEFT = 5
_LANE_RIGHT = 6

_STATE_STYLES = {"ready": "good", "starting": "warn", "stopping": "warn"}


@dataclass(frozen=True, slots=True)
class Screen:
    """The screen's content: the lines of each visible panel, and the keys of rows by line."""

    lines: list[Line]
    places: dict[Panel, range]
    rows: dict[int, tuple[Panel, str]]


def compose(picture: Picture, view: View, width: int, height: int) -> Screen:
    """``height`` lines of ``width`` cells."""
    all_tables = tables(picture, view)
    wanted = wishes(*(all_tables[panel].num_all for panel in _COUNTED))
    heights = share_out(wanted, height - 2, view.maximised)
    lines: list[Line] = [header(picture, view, width)]
    places: dict[Panel, range] = {}
    rows: dict[int, tuple[Panel, str]] = {}
    for panel, num_lines in heights.items():
        first = len(lines)
        places[panel] = range(first, first + num_lines)
        drawn, keys = _panel(panel, picture, view, all_tables, width, num_lines)
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
        table.keys,
        view,
        view.sorting.get(panel),
        view.selected.get(panel),
        width,
        height - 1,
        at_end=panel is Panel.EVENTS,
    )
    shades = legend(view) if panel is Panel.DEVICES else ()
    notes = _notes(panel, table, drawn, view)
    if panel is Panel.MODELS:
        notes[1:1] = pause_notes(picture.latest.models)
        notes += addition_notes(picture.latest.additions)
    title = title_line(panel, view, notes, shades, width)
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
    devices = sorted(picture.latest.devices, key=lambda device: device.device)
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


def header(picture: Picture, view: View, width: int) -> Line:
    """Return the daemon's state in one line; the least important parts are dropped first."""
    right = _right(picture, view)
    left: list[Span] = [Span(" gpupool ", "brand"), Span(" ")]
    if view.lost:
        left.append(Span(f"{view.glyphs.dot} {clean(view.lost)}", "bad"))
        return _both(left, right, width, "bar")
    state = picture.latest.status.state
    left.append(Span(f"{view.glyphs.dot} {state}", _STATE_STYLES.get(state, "")))
    for text, text_style in _facts(picture.latest):
        piece = (Span(f" {view.glyphs.separator} ", "dim"), Span(text, text_style))
        if width_of(left) + width_of(piece) + width_of(right) + 1 > width:
            break
        left += piece
    return _both(left, right, width, "bar")


def _facts(top: Top) -> Iterable[tuple[str, str]]:
    status = top.status
    rate = sum(model.usage.tokens_per_s for model in top.models)
    yield f"{status.num_live_requests} live", ""
    yield f"{count(rate)} tok/s", ""
    refused = status.num_refused_requests
    yield f"{count(refused)} refused", "warn" if refused else ""
    yield _number(len(top.devices), "device"), ""
    yield _number(status.num_models, "model"), ""
    yield f"up {uptime(status.uptime_s)}", ""
    switches = f"{count(top.num_switches)} switch{'es' * (top.num_switches != 1)}"
    yield f"{switches}, {size(top.switched_bytes)} moved", ""
    limit = size(status.model_cache_limit_bytes)
    yield f"cache {size(status.model_cache_bytes)}/{limit}", ""
    yield f"daemon {size(status.rss_bytes)}", ""
    yield f"v{status.version}", "dim"


def _number(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _right(picture: Picture, view: View) -> list[Span]:
    spans = []
    if view.is_read_only:
        spans.append(Span("read-only ", "warn"))
    if view.is_held:
        spans.append(Span("HELD ", "warn"))
    every = f" +{duration(view.interval_s)}" if view.interval_s else ""
    spans.append(Span(f"{clock(picture.latest.at, view.zone)}{every} ", "dim"))
    return spans


def title_line(panel: Panel, view: View, notes: Sequence[str], legend: Line, width: int) -> Line:
    style = "title focus" if panel is view.focus else "title"
    rule = view.glyphs.rule
    left = [Span(f"{rule}{panel.value} ", "rule"), Span(panel.title, style), Span(" ")]
    if notes:
        left.append(Span(f"{view.glyphs.separator} ".join(f"{note} " for note in notes), "dim"))
    room = width - width_of(left) - width_of(legend) - 2
    right: Line = legend if room >= 0 else ()
    gap = width - width_of(left) - width_of(right) - (1 if right else 0)
    if gap < 0:
        return fit_line(left, width)
    end = (Span(" "), *right) if right else ()
    return fit_line((*left, Span(rule * gap, "rule"), *end), width)


def footer(view: View, hidden: Sequence[Panel], width: int) -> Line:
    """The result of the last action, or the keys of the panel in focus; and what is not shown."""
    right: list[Span] = []
    if hidden:
        names = ", ".join(f"{panel.value} {panel.title}" for panel in hidden)
        right = [Span(f" not shown: {names} ", "warn")]
    if view.message:
        left = [Span(" "), Span(clean(view.message), view.message_style)]
        return _both(left, right, width, "bar")
    left = [Span(" ")]
    for key, word, is_action in _hints(view):
        style = "off" if is_action and view.is_read_only else ""
        piece = (Span(key, f"key {style}".strip()), Span(f" {word}  ", style or "dim"))
        if width_of(left) + width_of(piece) + width_of(right) > width:
            break
        left += piece
    return _both(left, right, width, "bar")


def _hints(view: View) -> Iterable[tuple[str, str, bool]]:
    yield "q", "quit", False
    yield "?", "help", False
    if view.filter:
        yield "esc", f"filter {view.filter!r} off", False
    if view.maximised:
        yield "esc", "all panels", False
    yield from _ACTIONS.get(view.focus, ())
    yield "enter", "details", False
    yield "/", "filter", False
    yield ",.", "sort", False
    yield "1-5", "panels", False
    yield "f", "hold", False


_ACTIONS = {
    Panel.DEVICES: (("d", "drain", True),),
    Panel.LANES: (("[]", "zoom", False),),
    Panel.MODELS: (("p", "pin", True), ("u", "unload", True), ("t", "targets", True)),
    Panel.REQUESTS: (("x", "cancel", True),),
}


def _both(left: Sequence[Span], right: Sequence[Span], width: int, style: str) -> Line:
    room = width - width_of(right)
    if room < 8:
        right, room = (), width
    spans = (*fit_line(left, room), *right)
    return tuple(Span(text, f"{style} {own}".strip()) for text, own in spans)
