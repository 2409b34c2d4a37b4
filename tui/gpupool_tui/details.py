"""Details of a row as lines of name and value."""

from __future__ import annotations

from rich.text import Text

from gpupool_tui.panels import due, has_harmless_pauses, where
from gpupool_tui.picture import Picture
from gpupool_tui.text import NOTHING, clock, count, duration, percent, plain, ranges, size
from gpupool_tui.view import View
from gpupoold.api.schemas import DeviceInfo, GpuInfo, ModelUsage, RequestInfo, TopModel
from gpupoold.api.schemas_explain import DeviceTurns, Why
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import Event
from gpupoold.units import clean

Fields = dict[str, str]


def as_text(fields: Fields) -> Text:
    """The fields below each other, the values in a column."""
    width = max(map(len, fields), default=0) + 2
    text = Text()
    for name, value in fields.items():
        text.append(f"{name:<{width}}", "dim")
        text.append(clean_lines(value).replace("\n", "\n" + " " * width) + "\n")
    text.rstrip()
    return text


def clean_lines(text: str) -> str:
    """Return text of several lines without control characters."""
    return "\n".join(clean(line) for line in text.split("\n"))


def device_fields(device: DeviceInfo, picture: Picture, view: View) -> Fields:
    turns = list(picture.turns.get(device.device, ()))[-8:]
    lines = [
        f"{clock(turn.began_at, view.zone)}  {turn.model}: {duration(turn.seconds)},"
        f" {turn.num_tokens} tokens, {_after(turn.switch_kind, turn.switch_s)}"
        for turn in reversed(turns)
    ]
    role = device.role + (" (by hand)" if device.is_role_fixed else " (the policy's choice)")
    return {
        "kind": device.kind,
        "state": device.state + (", draining" if device.is_draining else ""),
        "process": NOTHING if device.pid is None else str(device.pid),
        "role": role,
        "on turn": device.on_turn or NOTHING,
        "quota": _quota(device),
        "requests": f"{device.num_requests}, {device.num_waiting_for_kv} waiting for KV memory",
        "memory": f"{size(device.device_bytes)}: {size(device.weights_bytes)} weights"
        f" ({size(device.prefetched_bytes)} prefetched),"
        f" {size(device.kv_bytes)} KV, {size(device.free_bytes)} free",
        "KV in host memory": f"{size(device.kv_host_bytes)} of"
        f" {size(device.kv_host_limit_bytes) if device.kv_host_limit_bytes else 'no limit'},"
        f" and {size(device.prefix_bytes)} of ended requests",
        "KV recomputed": f"{device.num_recomputed} times for lack of memory",
        "link": f"{size(device.link_in_bytes_per_s)}/s in,"
        f" {size(device.link_out_bytes_per_s)}/s out",
        "engines": _engines(device),
        **({"GPUs": _gpus(device)} if device.gpus else {"GPU": _gpu(device)}),
        "steps": count(device.num_steps),
        "latest turns": "\n".join(lines) or NOTHING,
    }


def model_fields(model: TopModel, info: ModelInfo | None) -> Fields:
    """Return a model's details; ``info`` is its registration, None while requested."""
    usage = model.usage
    fields = {
        "state": usage.state + (f": {info.error}" if info is not None and info.error else ""),
        "on devices": where(model),
        "engines": _hosting(model),
        "targets": f"{duration(model.ttft_s)} to the first token,"
        f" {duration(model.tbt_s)} between tokens",
        "first token": _percentiles(usage.ttft_p50_s, usage.ttft_p99_s),
        "between tokens": _percentiles(usage.tbt_p50_s, usage.tbt_p99_s)
        + ("; tokens early enough cover the pauses" if has_harmless_pauses(model) else ""),
        "in time": f"{percent(usage.attainment_1m)} % of the last minute's tokens,"
        f" {percent(usage.attainment_1h)} % of the last hour's,"
        f" {percent(usage.attainment)} % since the start",
        "tokens": f"{count(usage.tokens)} since the start, {count(usage.tokens_per_s)}/s now",
        "requests": f"{usage.num_live} live, {usage.num_waiting} waiting;"
        f" {usage.completed} completed of {usage.requests}, {usage.refused} refused,"
        f" {usage.dropped} dropped",
        "weights": f"{size(usage.weights_total_bytes)},"
        f" {size(usage.weights_resident_bytes)} on devices" + _unbound(usage),
        "snapshot": (
            f"{size(usage.cached_bytes)} in host memory" if usage.cached_bytes else NOTHING
        )
        + (", pinned" if model.is_pinned else ""),
        "KV": f"{size(usage.kv_resident_bytes)} on devices,"
        f" {size(usage.kv_host_bytes)} in host memory;"
        f" {size(usage.prefix_saved_bytes)} of ended requests saved,"
        f" {size(usage.prefix_hit_bytes)} reused" + _fetched(usage),
    }
    if info is not None:
        fields |= {
            "aliases": ", ".join(info.aliases) or NOTHING,
            "presets": ", ".join(preset.name for preset in info.presets) or NOTHING,
            "adapters": ", ".join(adapter.name for adapter in info.adapters) or NOTHING,
            "pace": info.pace or "tokens as they come",
            "architecture": info.architecture or NOTHING,
            "longest request": f"{info.max_model_len} tokens" if info.max_model_len else NOTHING,
            "source": info.source,
            "path": info.path,
        }
    return fields


def _engines(device: DeviceInfo) -> str:
    limit_bytes = device.engine_limit_bytes
    limit = "" if limit_bytes is None else f" of {size(limit_bytes)}"
    return f"{device.num_engines}, {size(device.engine_bytes)}{limit} outside the pages"


def _hosting(model: TopModel) -> str:
    """Return the devices that have the engine, its memory, and whose choice that is."""
    engines = model.usage.engines
    how = f" (by hand: {ranges(model.fixed_devices)})" if model.fixed_devices else ""
    if not engines:
        slots = model.usage.slots
        return f"none{how}" + (f", takes over one on {ranges(slots)}" if slots else "")
    largest = max(engine.device_bytes for engine in engines)
    devices = ranges(engine.device for engine in engines)
    return f"{devices}{how}, up to {size(largest)} outside the pages"


def _unbound(usage: ModelUsage) -> str:
    """Return the weights that stay on devices without an engine."""
    num_bytes = usage.unbound_bytes
    return f", {size(sum(num_bytes.values()))} without an engine" if num_bytes else ""


def request_fields(request: RequestInfo, view: View) -> Fields:
    where_text = "no device yet" if request.device is None else f"device {request.device}"
    return {
        "id": request.request_id,
        "model": request.model,
        "on": where_text,
        "age": duration(request.age_s),
        "prompt": f"{request.num_prompt_tokens} tokens",
        "answer": f"{request.num_output_tokens} tokens",
        "next token due": plain(due(request, view)),
    }


def why_fields(why: Why) -> Fields:
    """Return the obstacle of a model or a request and the rule, as ``gpupool why`` does."""
    if why.request is not None:
        request = why.request
        fields = {"why": request.text}
        if request.num_before:
            fields["ahead"] = f"{request.num_before} requests"
        if request.next_token_in_s is not None:
            fields["next token expected"] = f"in about {duration(request.next_token_in_s)}"
        if request.why:
            fields["device"] = request.why
        return fields | _line_fields(request.turns)
    if why.model is not None:
        fields = {"why": why.model.text}
        if (first_s := why.model.first_token_in_s) is not None:
            fields["new request"] = f"first token expected in {duration(first_s)}"
        if why.model.paced_gap_p50_s is not None:
            gaps = why.model.paced_gap_p50_s, why.model.paced_gap_p99_s
            fields["paced gaps"] = _percentiles(*gaps, span="as released since the start")
        if why.model.advice:
            fields["advice"] = "\n".join(why.model.advice)
        return fields
    return {} if why.finished is None else {"why": why.finished.text}


def _line_fields(device: DeviceTurns | None) -> Fields:
    """Return the present turn on a request's device, and the queue."""
    if device is None:
        return {}
    fields: Fields = {}
    if device.on_turn is not None:
        fields["on turn"] = f"{device.on_turn}: {device.why or device.rule or NOTHING}"
    waiting = [
        f"{turn.model}: {turn.why}"
        + (f", in about {duration(turn.starts_in_s)}" if turn.starts_in_s is not None else "")
        for turn in device.line[:5]
    ]
    return fields | ({"next turns": "\n".join(waiting)} if waiting else {})


def event_fields(event: Event, view: View) -> Fields:
    return {
        "at": clock(event.at, view.zone),
        "level": event.level,
        "what": event.kind,
        "of": event.subject,
        "message": event.message,
    }


def _after(kind: str, seconds: float) -> str:
    words = {"weights": "weights came in", "kv": "KV came in", "pages": "pages were mapped"}
    if kind == "none":
        return "no switch"
    return f"{words.get(kind, kind)} in {duration(seconds)}"


def _quota(device: DeviceInfo) -> str:
    if device.on_turn is None:
        return NOTHING
    if device.quota_s is None:
        return f"{duration(device.quota_used_s)} used, no limit"
    used, left = duration(device.quota_used_s), duration(device.quota_left_s)
    return f"{used} of {duration(device.quota_s)} used, {left} left"


def _gpus(device: DeviceInfo) -> str:
    return "\n".join(
        f"{gpu.gpu}: {size(gpu.memory_bytes - gpu.free_bytes)} of {size(gpu.memory_bytes)} in use, "
        f"{_gpu(gpu)}"
        for gpu in device.gpus
    )


def _gpu(device: DeviceInfo | GpuInfo) -> str:
    if device.utilisation is None and device.temperature_c is None and device.power_w is None:
        return "no readings"
    busy = NOTHING if device.utilisation is None else f"{100 * device.utilisation:.0f} %"
    warm = NOTHING if device.temperature_c is None else f"{device.temperature_c:.0f} C"
    power = NOTHING if device.power_w is None else f"{device.power_w:.0f} W"
    return f"{busy} busy, {warm}, {power}"


def _percentiles(
    p50_s: float | None, p99_s: float | None, span: str = "during the last hour"
) -> str:
    if p50_s is None or p99_s is None:
        return NOTHING
    return f"{duration(p50_s)} (half), {duration(p99_s)} (99 of 100), {span}"


def _fetched(usage: ModelUsage) -> str:
    parts = {"other devices": usage.prefix_peer_bytes, "files": usage.prefix_file_bytes}
    found = [f"{size(num_bytes)} from {place}" for place, num_bytes in parts.items() if num_bytes]
    return f" ({', '.join(found)})" if found else ""
