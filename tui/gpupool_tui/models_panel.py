"""The models: memory, requests, and attainment of targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpupool_tui.bars import sparkline
from gpupool_tui.lanes import colour_of
from gpupool_tui.numbers import NOTHING, count, duration, percent, ranges, size
from gpupool_tui.picture import Picture
from gpupool_tui.table import TableColumn, figure, or_last, or_least
from gpupool_tui.text import Line, Span
from gpupool_tui.view import View
from gpupoold.api.schemas import AdditionInfo, TopModel
from gpupoold.api.schemas_models import amount_text
from gpupoold.units import clean

GOOD_ATTAINMENT = 0.9
_STATE_STYLES = {"ready": "good", "loading": "warn", "draining": "warn", "failed": "bad"}


def key_of(model: TopModel) -> str:
    """Return a model's key for selection."""
    return model.usage.name


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

    return TableColumn(key, title, 5, cell, lambda one: or_last(value(one)), right=True, rank=rank)


_BEFORE: tuple[TableColumn[TopModel], ...] = (
    TableColumn("name", "MODEL", 10, _name, lambda one: one.usage.name, grows=30),
    TableColumn("state", "STATE", 8, _state, lambda one: one.usage.state, rank=1),
    TableColumn("on", "ON", 4, _where, lambda one: (not one.devices, one.devices), rank=5, grows=4),
    figure("live", "LIVE", 4, lambda one: one.usage.num_live, zero="dim"),
    figure("wait", "WAIT", 4, lambda one: one.usage.num_waiting, style="warn", zero="dim"),
    TableColumn(
        "ttft", "TTFT p50/99", 15, _ttft, lambda one: or_least(one.usage.ttft_p99_s), True, True, 2
    ),
    TableColumn(
        "tbt", "TBT p50/99", 15, _tbt, lambda one: or_least(one.usage.tbt_p99_s), True, True, 2
    ),
    TableColumn("target", "TARGETS", 11, _targets, lambda one: one.tbt_s, right=True, rank=8),
    _share("1m", "1MIN%", lambda one: one.usage.attainment_1m, 0),
    _share("1h", "1H%", lambda one: one.usage.attainment_1h, 6),
)
_AFTER: tuple[TableColumn[TopModel], ...] = (
    figure("rate", "TOK/S", 5, lambda one: one.usage.tokens_per_s, count, 3, zero="dim"),
    figure(
        "weights", "WEIGHTS", 7, lambda one: one.usage.weights_total_bytes, size, 10, zero="dim"
    ),
    figure("kv", "KV", 7, lambda one: one.usage.kv_resident_bytes, size, 11, zero="dim"),
    figure("paused", "PAUSED", 7, lambda one: one.usage.kv_host_bytes, size, 12, zero="dim"),
    TableColumn("pin", "PIN", 4, _pinned, lambda one: not one.is_pinned, rank=13),
)


def columns(picture: Picture) -> Sequence[TableColumn[TopModel]]:
    """Return the columns; the sparkline uses earlier answers."""

    def spark(model: TopModel, view: View, width: int) -> Line:
        shares = picture.minutes_of(model.usage.name)
        return (Span(sparkline(shares, width, view.glyphs), "spark"),)

    return (*_BEFORE, TableColumn("spark", "LAST HOUR", 10, spark, rank=9, grows=20), *_AFTER)
