"""The devices: present turns and memory."""

from __future__ import annotations

from collections.abc import Sequence

from gpupool_tui.bars import gauge, memory_bar
from gpupool_tui.lanes import colour_of
from gpupool_tui.numbers import NOTHING, duration, size
from gpupool_tui.table import TableColumn, figure, or_least, plain
from gpupool_tui.text import Line, Span, fit
from gpupool_tui.view import View
from gpupoold.api.schemas import DeviceInfo
from gpupoold.units import clean

_GAUGE_CELLS = 6
_HOT_C = 85.0
_STATE_STYLES = {"ready": "", "parked": "dim", "starting": "warn", "down": "bad"}


def key_of(device: DeviceInfo) -> str:
    """Return a device's key for selection."""
    return str(device.device)


def _role(device: DeviceInfo, view: View, width: int) -> Line:
    if device.is_draining:
        return (Span("draining", "warn"),)
    return (Span(device.role + ("*" if device.is_role_fixed else "")),)


def _on_turn(device: DeviceInfo, view: View, width: int) -> Line:
    if device.state != "ready":
        return (Span(device.state, _STATE_STYLES.get(device.state, "bad")),)
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


COLUMNS: Sequence[TableColumn[DeviceInfo]] = (
    TableColumn("device", "DEV", 3, plain(key_of, "bold"), lambda one: one.device, right=True),
    TableColumn("role", "ROLE", 8, _role, lambda one: one.role, rank=2),
    TableColumn("turn", "ON TURN", 10, _on_turn, lambda one: one.on_turn or "~", grows=22),
    TableColumn("quota", "QUOTA", 19, _quota, rank=3),
    figure("util", "UTIL", 4, lambda one: one.utilisation, "{:.0%}".format, 5),
    TableColumn(
        "temp", "TEMP", 5, _temperature, lambda one: or_least(one.temperature_c), True, True, rank=6
    ),
    figure("power", "POWER", 5, lambda one: one.power_w, "{:.0f}W".format, 7),
    figure("live", "LIVE", 4, lambda one: one.num_requests, rank=1),
    TableColumn("memory", "MEMORY", 24, _memory, lambda one: one.free_bytes, grows=46),
    figure("host", "KV-HOST", 7, lambda one: one.kv_host_bytes, size, 8),
    TableColumn("wait", "KV-WAIT", 7, _waiting_for_kv, None, True, True, rank=9),
)


def legend(view: View) -> Line:
    """Return the meaning of the bars' shades."""
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
