"""The lines around the panels: header, titles, footer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gpupool_tui.numbers import clock, count, duration, size, uptime
from gpupool_tui.picture import Picture
from gpupool_tui.text import Line, Span, fit_line, width_of
from gpupool_tui.view import Panel, View
from gpupoold.api.schemas import Top
from gpupoold.units import clean

_STATE_STYLES = {"ready": "good", "starting": "warn", "stopping": "warn"}


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
    """Return a panel's title line with its number, name, notes and a legend."""
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
