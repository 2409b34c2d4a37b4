"""``why``: explain the place of a model or request, the obstacle, and a remedy."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.options import JsonOption, complete_model_name, model_name, open_client
from gpupool_cli.output import columns, duration_text
from gpupool_cli.status import loading_text
from gpupoold.api import schemas_explain
from gpupoold.domain import WaitingTurn
from gpupoold.units import format_bytes, format_duration

# Share of tokens in time that a model should have, as in `gpupool top`.
_ON_TIME = 0.9
_LINE_COLUMNS = columns("NEXT>, MODEL, REQUESTS>, STARTS-IN>, TAKES>, RULE, WHY")


def why(
    ctx: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="MODEL|REQUEST",
            parser=model_name,
            help="A model by name or alias, or a request by its id or a part of the id: of "
            "`gpupool ps`, or the client's x-request-id or id of the answer.",
            autocompletion=complete_model_name,
        ),
    ],
    as_json: JsonOption = False,
) -> None:
    """Say where a model or request is, which rule or resource delays it, and for how long."""
    with open_client(ctx) as client:
        answer = client.why(name)
    if as_json:
        output.print_json(answer)
    elif answer.request is not None:
        _show_request(answer.request)
    elif answer.model is not None:
        _show_model(answer.model)
    elif answer.finished is not None:
        _show_finished(answer.finished)


def _show_request(request: schemas_explain.RequestWhy) -> None:
    due_s = request.next_deadline_in_s
    due = f"due in {format_duration(due_s)}" if due_s >= 0 else f"late by {format_duration(-due_s)}"
    expected = request.next_token_in_s
    fields = {
        "request": request.request_id,
        "model": request.model,
        "state": request.text
        + (f"; {request.num_before} requests ahead" if request.num_before else ""),
        "tokens": f"{request.num_output_tokens} after a prompt of {request.num_prompt_tokens}",
        "age": format_duration(request.age_s),
        "next token": f"{due}; expected "
        + ("after the wait above" if expected is None else f"in about {format_duration(expected)}"),
    }
    if request.also_live:
        fields["same client"] = f"also live: {', '.join(request.also_live)}"
    if request.device is not None:
        fields["device"] = f"{request.device}: {request.why or 'sent to the device'}"
    output.print_fields(fields)
    if request.turns is not None:
        _show_device(request.turns)


def _show_device(device: schemas_explain.DeviceTurns, engine: str = "") -> None:
    """Show a device and its next turns; ``engine`` is about the model's engine there."""
    output.print_line("")
    name = f"device {device.device}{_group_text(device)}"
    if device.on_turn is None:
        output.print_line(f"{name}: idle")
    else:
        left_s = device.left_s
        left = "until another model waits" if left_s is None else f"{format_duration(left_s)} left"
        because = f": {device.why}" if device.why else ""
        used = format_duration(device.used_s)
        output.print_line(f"{name}: {device.on_turn} on turn for {used}, {left}{because}")
    if engine:
        output.print_line(f"device {device.device} has an engine of the model, {engine}")
    if device.loading is not None:
        output.print_line(loading_text(device.device, device.loading))
    if device.num_waiting_for_kv:
        output.print_line(f"{device.num_waiting_for_kv} requests wait for KV memory")
    if device.line:
        rows = [_line_row(number, turn) for number, turn in enumerate(device.line, start=1)]
        output.print_table(_LINE_COLUMNS, rows)


def _group_text(device: schemas_explain.DeviceTurns) -> str:
    """Return the GPUs of a group, empty for a single GPU."""
    if device.num_gpus == 1:
        return ""
    if device.gpus:
        return f" (GPUs {', '.join(map(str, device.gpus))})"
    return f" ({device.num_gpus} GPUs)"


def _line_row(number: int, turn: WaitingTurn) -> list[str]:
    return [
        str(number),
        turn.model,
        str(turn.num_requests),
        duration_text(turn.starts_in_s),
        duration_text(turn.duration_s),
        turn.rule,
        turn.why,
    ]


def _show_model(model: schemas_explain.ModelWhy) -> None:
    hour = model.hour
    fields = {
        "model": model.name,
        "state": model.text,
        "targets": f"TTFT {format_duration(model.ttft_s)}, TBT {format_duration(model.tbt_s)}",
        "last minute": f"{_percent(model.attainment_1m)} of tokens in time",
        "last hour": f"{_percent(hour.attainment)} of {hour.tokens} tokens in time",
        "": f"TTFT p50 {duration_text(hour.ttft_p50_s)}, p99 {duration_text(hour.ttft_p99_s)}; "
        f"TBT p50 {duration_text(hour.tbt_p50_s)}, p99 {duration_text(hour.tbt_p99_s)}",
        "pauses": _pauses(model),
        "paced gaps": ""
        if model.paced_gap_p50_s is None
        else f"p50 {duration_text(model.paced_gap_p50_s)}, "
        f"p99 {duration_text(model.paced_gap_p99_s)}",
        "lateness": output.lateness_text(hour.lateness) or "none",
        "weights": _weights(model),
        "new request": "first token expected "
        + (
            "when a device has the model"
            if model.first_token_in_s is None
            else f"in about {format_duration(model.first_token_in_s)}"
            f" (prompt of {model.prompt_tokens})"
        ),
    }
    if model.standings:
        counts = (f"{num} {standing}" for standing, num in sorted(model.standings.items()))
        fields["live requests"] = ", ".join(counts)
    if text := _prefix_cache(model):
        fields["prefix cache"] = text
    output.print_fields({name: text for name, text in fields.items() if text})
    for advice in model.advice:
        output.print_line(f"hint: {advice}")
    for place in model.devices:
        engine = f"{format_bytes(place.engine_bytes)} outside the pages: {place.hosting}"
        if place.why_unshared:
            engine += f"; no fine-tune can take the engine over: {place.why_unshared}"
        _show_device(place.turns, engine if place.hosting else "")


def _pauses(model: schemas_explain.ModelWhy) -> str:
    """Return why a TBT above the target is no fault, empty if it is one or is not there."""
    p99_s, attainment = model.hour.tbt_p99_s, model.hour.attainment
    if p99_s is None or p99_s <= model.tbt_s or attainment is None or attainment < _ON_TIME:
        return ""
    return "a TBT p99 above the target is normal where models take turns: the tokens are in time"


def _percent(share: float | None) -> str:
    return output.NOTHING if share is None else f"{100 * share:.1f} %"


def _weights(model: schemas_explain.ModelWhy) -> str:
    places = [_place(device) for device in model.devices]
    if model.unbound_bytes:
        places.append(f"{output.unbound_text(model.unbound_bytes)} without an engine")
    if model.cached_bytes:
        places.append(f"host memory ({format_bytes(model.cached_bytes)})")
    return ", ".join(filter(None, places)) or "nowhere; the next request loads the weights"


def _place(model: schemas_explain.ModelOnDevice) -> str:
    if not model.weights_resident_bytes:
        return ""
    share = model.weights_resident_bytes / max(model.weights_total_bytes, 1)
    part = "" if share >= 1 else f" ({100 * share:.0f} % of the weights)"
    return f"device {model.device}{part}"


def _show_finished(finished: schemas_explain.FinishedWhy) -> None:
    request = finished.request
    fields = {
        "request": request.request_id,
        "model": request.model,
        "state": f"has ended: {finished.text}",
        "arrived": output.time_text(request.arrived_at),
        "device": output.NOTHING if finished.device is None else str(finished.device),
        "tokens": f"{request.num_output_tokens} after a prompt of {request.num_prompt_tokens}",
        "first token": f"after {duration_text(request.ttft_s)}",
        "between tokens": f"p99 {duration_text(request.tbt_p99_s)}",
    }
    output.print_fields(fields)
    for event in finished.events:
        when = output.time_text(event.at)
        output.print_line(f"{when} {event.level} {event.kind}: {event.message}")


def _prefix_cache(model: schemas_explain.ModelWhy) -> str:
    """Return a line about KV of ended requests, empty without any."""
    saved_bytes = sum(device.prefix_saved_bytes for device in model.devices)
    hit_bytes = sum(device.prefix_hit_bytes for device in model.devices)
    if not saved_bytes and not hit_bytes:
        return ""
    found = [f"{format_bytes(hit_bytes)} used again"]
    for text, num_bytes in (
        ("from another device's memory", sum(device.prefix_peer_bytes for device in model.devices)),
        ("from files", sum(device.prefix_file_bytes for device in model.devices)),
    ):
        if num_bytes:
            found.append(f"{format_bytes(num_bytes)} {text}")
    saved = f"{format_bytes(saved_bytes)} of KV of ended requests saved to host memory"
    return ", ".join([saved, *found])
