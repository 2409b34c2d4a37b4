"""The tables of the panels: columns, cells, and the rows' keys for selection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gpupool_tui.lanes import colour_of
from gpupool_tui.picture import Picture
from gpupool_tui.table import TableColumn, figure, or_last, or_least, plain, sort_rows
from gpupool_tui.text import (
    NOTHING,
    Glyphs,
    Line,
    Span,
    clock,
    count,
    duration,
    fit,
    percent,
    ranges,
    size,
)
from gpupool_tui.view import Panel, View
from gpupoold.api.schemas import AdditionInfo, DeviceInfo, RequestInfo, TopModel
from gpupoold.api.schemas_models import amount_text
from gpupoold.domain import Event
from gpupoold.units import clean

GOOD_ATTAINMENT = 0.9
_STATE_STYLES = {"ready": "good", "loading": "warn", "draining": "warn", "failed": "bad"}

_LEVELS = {"info": ("info", "dim"), "warning": ("warn", "warn"), "error": ("ERROR", "bad")}
_GAUGE_CELLS = 6
_HOT_C = 85.0
_DEVICE_STYLES = {"ready": "", "parked": "dim", "starting": "warn", "down": "bad"}

# Lower bounds of the levels for shares of tokens in time, close together near 1.
LEVEL_STARTS = (0.0, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)


def where(model: TopModel) -> str:
    """Return the devices with the model's weights; else the nearest place of its weights."""
    if model.devices:
        return ranges(model.devices)
    if model.usage.weights_resident_bytes:
        return "part"
    return "host" if model.usage.cached_bytes else NOTHING


def addition_notes(additions: Sequence[AdditionInfo]) -> list[str]:
    """Return notes on models that are being added, with the progress of their downloads."""
    return [
        f"adding {clean(addition.name)}: {amount_text(addition) or addition.stage}"
        for addition in additions
    ]


def _name_of(model: TopModel) -> str:
    return model.usage.name


def _name(model: TopModel, view: View, width: int) -> Line:
    return (Span(clean(model.usage.name), f"bold {colour_of(model.usage.name)}"),)


def _state(model: TopModel, view: View, width: int) -> Line:
    return (Span(model.usage.state, _STATE_STYLES.get(model.usage.state, "")),)


def _where(model: TopModel, view: View, width: int) -> Line:
    text = where(model)
    return (Span(text, "" if model.devices else "dim"),)


def is_on_time(model: TopModel) -> bool:
    """Return whether enough tokens of the last hour were in time, or there were none."""
    share = model.usage.attainment_1h
    return share is None or share >= GOOD_ATTAINMENT


def has_harmless_pauses(model: TopModel) -> bool:
    """Return whether the model's tokens are in time with a TBT p99 above the target.

    An answer pauses during turns of other models, and its tokens are early before and after.
    """
    p99_s = model.usage.tbt_p99_s
    return p99_s is not None and p99_s > model.tbt_s and is_on_time(model)


def pause_notes(models: Sequence[TopModel]) -> list[str]:
    """Return the reason for a TBT p99 above the target of models whose tokens are in time."""
    return ["TBT p99 above target: pauses between turns"] * any(map(has_harmless_pauses, models))


def _pair(
    model: TopModel, p50_s: float | None, p99_s: float | None, target_s: float, view: View
) -> Line:
    if p50_s is None or p99_s is None:
        return (Span(NOTHING, "dim"),)

    def against(seconds: float) -> Span:
        is_late = seconds > target_s and not is_on_time(model)
        return Span(duration(seconds) + view.glyphs.late * is_late, "bad" if is_late else "")

    return (against(p50_s), Span("/", "dim"), against(p99_s))


def _ttft(model: TopModel, view: View, width: int) -> Line:
    usage = model.usage
    return _pair(model, usage.ttft_p50_s, usage.ttft_p99_s, model.ttft_s, view)


def _tbt(model: TopModel, view: View, width: int) -> Line:
    usage = model.usage
    return _pair(model, usage.tbt_p50_s, usage.tbt_p99_s, model.tbt_s, view)


def _targets(model: TopModel, view: View, width: int) -> Line:
    return (Span(f"{duration(model.ttft_s)}/{duration(model.tbt_s)}", "dim"),)


def _pinned(model: TopModel, view: View, width: int) -> Line:
    return (Span("yes") if model.is_pinned else Span(NOTHING, "dim"),)


def _share(
    key: str, title: str, value: Callable[[TopModel], float | None], rank: int
) -> TableColumn[TopModel]:
    """Return a column of shares of tokens on time; the worst come first when sorted."""

    def cell(model: TopModel, view: View, width: int) -> Line:
        share = value(model)
        if share is None:
            return (Span(NOTHING, "dim"),)
        if share < GOOD_ATTAINMENT:
            return (Span(percent(share) + view.glyphs.late, "bad"),)
        return (Span(percent(share), "good"),)

    return TableColumn(
        key, title, 5, cell, lambda model: or_last(value(model)), right=True, rank=rank
    )


_BEFORE: tuple[TableColumn[TopModel], ...] = (
    TableColumn("name", "MODEL", 10, _name, _name_of, grows=30),
    TableColumn("state", "STATE", 8, _state, lambda model: model.usage.state, rank=1),
    TableColumn(
        "on", "ON", 4, _where, lambda model: (not model.devices, model.devices), rank=5, grows=4
    ),
    figure("live", "LIVE", 4, lambda model: model.usage.num_live, zero="dim"),
    figure("wait", "WAIT", 4, lambda model: model.usage.num_waiting, style="warn", zero="dim"),
    TableColumn(
        "ttft",
        "TTFT p50/99",
        15,
        _ttft,
        lambda model: or_least(model.usage.ttft_p99_s),
        True,
        True,
        2,
    ),
    TableColumn(
        "tbt", "TBT p50/99", 15, _tbt, lambda model: or_least(model.usage.tbt_p99_s), True, True, 2
    ),
    TableColumn("target", "TARGETS", 11, _targets, lambda model: model.tbt_s, right=True, rank=8),
    _share("1m", "1MIN%", lambda model: model.usage.attainment_1m, 0),
    _share("1h", "1H%", lambda model: model.usage.attainment_1h, 6),
)
_AFTER: tuple[TableColumn[TopModel], ...] = (
    figure("rate", "TOK/S", 5, lambda model: model.usage.tokens_per_s, count, 3, zero="dim"),
    figure(
        "weights", "WEIGHTS", 7, lambda model: model.usage.weights_total_bytes, size, 10, zero="dim"
    ),
    figure("kv", "KV", 7, lambda model: model.usage.kv_resident_bytes, size, 11, zero="dim"),
    figure("paused", "PAUSED", 7, lambda model: model.usage.kv_host_bytes, size, 12, zero="dim"),
    TableColumn("pin", "PIN", 4, _pinned, lambda model: not model.is_pinned, rank=13),
)


def columns(picture: Picture) -> Sequence[TableColumn[TopModel]]:

    def spark(model: TopModel, view: View, width: int) -> Line:
        shares = picture.minutes_of(model.usage.name)
        return (Span(sparkline(shares, width, view.glyphs), "spark"),)

    return (*_BEFORE, TableColumn("spark", "LAST HOUR", 10, spark, rank=9, grows=20), *_AFTER)


def _number_of(device: DeviceInfo) -> str:
    return str(device.device)


def _role(device: DeviceInfo, view: View, width: int) -> Line:
    if device.is_draining:
        return (Span("draining", "warn"),)
    return (Span(device.role + ("*" if device.is_role_fixed else "")),)


def _on_turn(device: DeviceInfo, view: View, width: int) -> Line:
    if device.state != "ready":
        return (Span(device.state, _DEVICE_STYLES.get(device.state, "bad")),)
    loading: Line = ()
    if device.loading is not None:
        loading = (Span(f" +{clean(device.loading.model)}", "warn"),)
    if device.on_turn is None:
        return (Span("idle", "dim"), *loading)
    return (Span(clean(device.on_turn), f"bold {colour_of(device.on_turn)}"), *loading)


def _quota(device: DeviceInfo, view: View, width: int) -> Line:
    if device.on_turn is None or device.state != "ready":
        return (Span(NOTHING, "dim"),)
    if not device.quota_used_s:
        return (Span(f"{view.glyphs.switch} coming in", "switch"),)
    if device.quota_left_s is None or device.quota_s is None:
        return (Span(f"{duration(device.quota_used_s)}, no end"),)
    share = device.quota_used_s / device.quota_s if device.quota_s else 1.0
    text = f" {duration(device.quota_used_s)}/{duration(device.quota_s)}"
    return (*gauge(share, _GAUGE_CELLS, view.glyphs), Span(text))


def _temperature(device: DeviceInfo, view: View, width: int) -> Line:
    if device.temperature_c is None:
        return (Span(NOTHING, "dim"),)
    is_hot = device.temperature_c >= _HOT_C
    text = f"{device.temperature_c:.0f}C" + (view.glyphs.late if is_hot else "")
    return (Span(text, "bad" if is_hot else ""),)


def _memory(device: DeviceInfo, view: View, width: int) -> Line:
    used = device.device_bytes - device.free_bytes
    text = fit(f" {size(used)}/{size(device.device_bytes)}", 12, right=True)
    bar = memory_bar(
        device.weights_bytes,
        device.prefetched_bytes,
        device.kv_bytes,
        device.free_bytes,
        device.device_bytes,
        width - len(text),
        view.glyphs,
    )
    return (*bar, Span(text))


def _waiting_for_kv(device: DeviceInfo, view: View, width: int) -> Line:
    return (Span(str(device.num_waiting_for_kv), "warn" if device.num_waiting_for_kv else ""),)


def cells_of(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Return the cells of each part within ``width``.

    No positive part vanishes; the sum is rounded, and rounding losses go to the largest remainders.
    """
    if whole <= 0 or width <= 0:
        return [0] * len(parts)
    exact = [max(0.0, part) / whole * width for part in parts]
    counts = [max(int(one), 1 if one > 0 else 0) for one in exact]
    wanted = min(width, round(sum(exact)))
    wanted = max(wanted, min(width, sum(one > 0 for one in exact)))
    by_remainder = sorted(range(len(parts)), key=lambda i: exact[i] - counts[i])
    while sum(counts) < wanted:
        counts[by_remainder.pop()] += 1
    while sum(counts) > wanted:
        largest = max(range(len(parts)), key=lambda i: counts[i])
        counts[largest] -= 1
    return counts


def memory_bar(
    weights: int, prefetched: int, kv: int, free: int, total: int, width: int, glyphs: Glyphs
) -> Line:
    """Return a device's memory as a bar: weights, prefetched weights, KV, other, free."""
    plain_weights = max(0, weights - prefetched)
    other = max(0, total - weights - kv - free)
    parts = (plain_weights, prefetched, kv, other)
    if total <= 0:
        return (Span(" " * width),)
    counts = cells_of(parts, total, width)
    names = ("weights", "prefetched", "kv", "other")
    marks = (glyphs.weights, glyphs.prefetched, glyphs.kv, glyphs.other)
    spans = [
        Span(mark * number, name)
        for mark, name, number in zip(marks, names, counts, strict=True)
        if number
    ]
    left = width - sum(counts)
    return (*spans, Span(glyphs.free * left, "free")) if left else tuple(spans)


def gauge(share: float, width: int, glyphs: Glyphs, style: str = "gauge") -> Line:
    [full] = cells_of([min(1.0, share)], 1.0, width)
    return (Span(glyphs.gauge * full, style), Span(glyphs.rest * (width - full), "dim"))


def sparkline(shares: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """Return shares (0 to 1) as a line, the newest at the right, averaged in groups to fit.

    Unknown values are left out.
    """
    if not shares or width <= 0:
        return glyphs.nothing * width
    per_cell = -(-len(shares) // width)
    # The last group is complete, because people look at the newest value.
    start = len(shares) % per_cell
    groups = [shares[i : i + per_cell] for i in range(start, len(shares), per_cell)]
    if start:
        groups.insert(0, shares[:start])
    drawn = "".join(_level(group, glyphs) for group in groups[-width:])
    return glyphs.nothing * (width - len(drawn)) + drawn


def _level(group: Sequence[float | None], glyphs: Glyphs) -> str:
    known = [share for share in group if share is not None]
    if not known:
        return glyphs.nothing
    mean = sum(known) / len(known)
    level = sum(mean >= start for start in LEVEL_STARTS)
    return glyphs.levels[max(1, level) - 1]


DEVICE_COLUMNS: Sequence[TableColumn[DeviceInfo]] = (
    TableColumn(
        "device", "DEV", 3, plain(_number_of, "bold"), lambda device: device.device, right=True
    ),
    TableColumn("role", "ROLE", 8, _role, lambda device: device.role, rank=2),
    TableColumn("turn", "ON TURN", 10, _on_turn, lambda device: device.on_turn or "~", grows=22),
    TableColumn("quota", "QUOTA", 19, _quota, rank=3),
    figure("util", "UTIL", 4, lambda device: device.utilisation, "{:.0%}".format, 5),
    TableColumn(
        "temp",
        "TEMP",
        5,
        _temperature,
        lambda device: or_least(device.temperature_c),
        True,
        True,
        rank=6,
    ),
    figure("power", "POWER", 5, lambda device: device.power_w, "{:.0f}W".format, 7),
    figure("live", "LIVE", 4, lambda device: device.num_requests, rank=1),
    TableColumn("memory", "MEMORY", 24, _memory, lambda device: device.free_bytes, grows=46),
    figure("host", "KV-HOST", 7, lambda device: device.kv_host_bytes, size, 8),
    TableColumn("wait", "KV-WAIT", 7, _waiting_for_kv, None, True, True, rank=9),
)


def legend(view: View) -> Line:
    g = view.glyphs
    pairs = (
        (g.weights, "weights", "weights"),
        (g.prefetched, "prefetched", "prefetched"),
        (g.kv, "KV", "kv"),
        (g.free, "free", "free"),
    )
    spans: list[Span] = []
    for mark, word, style in pairs:
        spans += [Span(mark, style), Span(f" {word}  ", "dim")]
    return tuple(spans)


def _id_of(request: RequestInfo) -> str:
    return request.request_id


def _model(request: RequestInfo, view: View, width: int) -> Line:
    return (Span(clean(request.model), colour_of(request.model)),)


def due(request: RequestInfo, view: View) -> Line:
    """Return the time to its next token's deadline, or the lateness."""
    if request.next_deadline_in_s < 0:
        return (Span(f"{duration(-request.next_deadline_in_s)} late{view.glyphs.late}", "bad"),)
    return (Span(f"in {duration(request.next_deadline_in_s)}"),)


REQUEST_COLUMNS: Sequence[TableColumn[RequestInfo]] = (
    TableColumn("id", "REQUEST", 12, plain(_id_of), _id_of, grows=36),
    TableColumn("model", "MODEL", 10, _model, lambda request: request.model, grows=20),
    figure("device", "DEV", 3, lambda request: request.device, descends=False),
    figure("age", "AGE", 6, lambda request: request.age_s, duration),
    figure("prompt", "PROMPT", 6, lambda request: request.num_prompt_tokens, count, 2),
    figure("tokens", "TOKENS", 6, lambda request: request.num_output_tokens, count, 1, zero="dim"),
    TableColumn(
        "due",
        "NEXT DUE",
        12,
        lambda request, view, _: due(request, view),
        lambda request: request.next_deadline_in_s,
        right=True,
    ),
)


def _message(event: Event, view: View, width: int) -> Line:
    return (Span(clean(event.message), "bad" if event.level == "error" else ""),)


EVENT_COLUMNS: Sequence[TableColumn[Event]] = (
    TableColumn(
        "time", "TIME", 8, lambda event, view, _: (Span(clock(event.at, view.zone), "dim"),)
    ),
    TableColumn("level", "LEVEL", 5, lambda line, *_: (Span(*_LEVELS[line.level]),)),
    TableColumn("kind", "WHAT", 14, plain(lambda event: event.kind, "bold"), grows=6),
    TableColumn("subject", "OF", 8, plain(lambda event: event.subject), rank=1, grows=12),
    TableColumn("message", "MESSAGE", 24, _message, grows=200),
)


@dataclass(frozen=True, slots=True)
class PanelTable:
    """A table's columns, its rows in order, and the rows' keys for selection."""

    columns: Sequence[TableColumn[Any]]
    rows: Sequence[Any]
    keys: Sequence[str]
    num_all: int


def tables(picture: Picture, view: View) -> dict[Panel, PanelTable]:
    """Return the rows of every table in order, without filtered ones."""
    wanted, top = view.filter.lower(), picture.latest

    def table(
        panel: Panel,
        every: Sequence[Any],
        columns: Sequence[TableColumn[Any]],
        key_of: Callable[[Any], str],
        text: Callable[[Any], str],
    ) -> PanelTable:
        kept = [row for row in every if not wanted or wanted in text(row).lower()]
        ordered = sort_rows(kept, columns, view.sorting.get(panel))
        num_live = top.status.num_live_requests if panel is Panel.REQUESTS else 0
        keys = [key_of(row) for row in ordered]
        return PanelTable(columns, ordered, keys, max(len(every), num_live))

    return {
        Panel.DEVICES: table(
            Panel.DEVICES,
            top.devices,
            DEVICE_COLUMNS,
            _number_of,
            lambda one: wanted,  # a name contains no device
        ),
        Panel.MODELS: table(Panel.MODELS, top.models, columns(picture), _name_of, _name_of),
        Panel.REQUESTS: table(
            Panel.REQUESTS,
            top.requests,
            REQUEST_COLUMNS,
            _id_of,
            lambda request: f"{request.request_id} {request.model}",
        ),
        Panel.EVENTS: table(
            Panel.EVENTS,
            list(picture.events),
            EVENT_COLUMNS,
            lambda event: str(event.id),
            lambda event: f"{event.kind} {event.subject} {event.message}",
        ),
    }
