"""``history``, ``switches``, ``usage``, ``batches``, ``events``, ``logs``: the daemon's past."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import say
from gpupool_cli.options import JsonOption, complete_model_name, duration_s, open_client
from gpupool_cli.output import Column, columns, duration_text, size_text
from gpupoold.api.schemas import BatchInfo, UseInfo
from gpupoold.api.schemas_explain import ModelSpan, SpanInfo
from gpupoold.domain import SWITCH_STAGES, DeviceUse, Event, RequestRecord, Switch
from gpupoold.durations import RequestStages
from gpupoold.errors import UsageError
from gpupoold.units import format_duration, format_energy

_HOUR_S = 3600.0
# The longest period that the daemon accepts.
_ALWAYS_S = 10 * 365 * 86400.0
_SPAN_COLUMNS = columns(
    "FROM, SPAN>, REQUESTS>, FAILED>, REFUSED>, TOKENS>, SLO%>, TTFT-p50>, TTFT-p99>, TBT-p50>, "
    "TBT-p99>, LATE-BY"
)
_BREAKDOWN_COLUMNS = (
    *columns("MODEL, REQUESTS>, TIME, TOTAL>"),
    *(Column(stage.upper(), right=True) for stage in RequestStages().by_name()),
)
_REQUEST_COLUMNS = columns(
    "ARRIVED, REQUEST, MODEL, PROMPT>, TOKENS>, LATE>, TTFT>, TBT-p99>, TOTAL>, ENDED"
)
_SWITCH_COLUMNS = columns(
    "AT, DEVICE>, MODEL, PREVIOUS, TOTAL>, EVICT>, MAP>, WEIGHTS>, KV>, MOVED>"
)
ModelArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="MODEL",
        help="Only this model, by name or alias.",
        autocompletion=complete_model_name,
    ),
]

FollowOption = Annotated[
    bool, typer.Option("--follow", "-f", help="Print new events until interrupted.")
]

JsonLinesOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document; with --follow one per line.")
]

_COLUMNS = columns(
    "BATCH, KEY, MODELS, STATE*, REQUESTS>, ANSWERED>, FAILED>, ADDED, WAITS-BECAUSE"
)

_DAY_S = 86_400.0
_USE_COLUMNS = columns("MODEL, KEY, REQUESTS>, PROMPT>, TOKENS>, GPU-TIME>, ENERGY>")
_DEVICE_COLUMNS = columns("DEVICE>, TIME>, COMPUTING>, SWITCHING>, ENERGY>")
_FRAGMENTATION_COLUMNS = columns("DEVICE>, KV-HOST>, SLABS>, FRAGMENTATION>")


def history(
    ctx: typer.Context,
    model: ModelArgument = None,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            parser=duration_s,
            help="Length of the period, such as 10m or 7d.  [default: 1h]",
        ),
    ] = None,
    requests: Annotated[
        bool, typer.Option("--requests", help="Single requests, latest first, not spans of time.")
    ] = False,
    request_id: Annotated[
        str | None,
        typer.Option(
            "--id",
            metavar="REQUEST",
            help="Only requests of any age with this id or part of an id: as shown here, or the "
            "client's x-request-id or id of the answer. Implies --requests.",
        ),
    ] = None,
    breakdown: Annotated[
        bool,
        typer.Option(
            "--breakdown",
            help="Mean time by stage and model, to the first token and between tokens; use of the "
            "host KV caches.",
        ),
    ] = False,
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", min=1, max=10_000, help="With --requests: how many at most."),
    ] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show counts of past requests: number, latency, and tokens on time."""
    requests = requests or request_id is not None
    if requests and breakdown:
        raise UsageError("--requests and --breakdown exclude each other", "give one of the two")
    if since_s is None:
        since_s = _HOUR_S if request_id is None else _ALWAYS_S
    columns: tuple[Column, ...]
    found: Sequence[RequestRecord | SpanInfo]
    devices: Sequence[DeviceUse] = ()
    with open_client(ctx) as client:
        if requests:
            found = records = client.past_requests(model, since_s, limit, request_id)
            rows, columns = [_request_row(record) for record in records], _REQUEST_COLUMNS
        elif breakdown:
            found = sums = client.history_by_model(model, since_s)
            rows, columns = [row for span in sums for row in _stage_rows(span)], _BREAKDOWN_COLUMNS
            devices = client.usage(since_s).devices
        else:
            found = spans = client.history(model, since_s)
            rows, columns = [_span_row(span) for span in spans], _SPAN_COLUMNS
    if as_json:
        output.print_json({"models": found, "devices": devices} if breakdown else found)
    elif rows:
        output.print_table(columns, rows)
        print_fragmentation(devices)
    else:
        what = "no request" if model is None else f"no request of {model}"
        what += "" if request_id is None else f" with the id {request_id} has ended"
        what += "" if since_s == _ALWAYS_S else f" in the last {format_duration(since_s)}"
        output.print_line(what)


def switches(
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only switches to this model.", autocompletion=complete_model_name
        ),
    ] = None,
    device: Annotated[
        int | None, typer.Option(metavar="NUMBER", min=0, help="Only on this device.")
    ] = None,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since", metavar="DURATION", parser=duration_s, help="How far back, such as 10m."
        ),
    ] = None,
    slowest: Annotated[
        bool, typer.Option("--slowest", help="The slowest first, not the latest.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many at most.")
    ] = 20,
    as_json: JsonOption = False,
) -> None:
    """Show switches and the time of each stage."""
    with open_client(ctx) as client:
        answer = client.switches(
            limit,
            model=model,
            device=device,
            since_s=since_s,
            order="slowest" if slowest else "latest",
        )
    if as_json:
        output.print_json(answer)
    else:
        output.print_table(_SWITCH_COLUMNS, [_switch_row(switch) for switch in answer])


def _span_row(span: SpanInfo) -> list[str]:
    attainment = span.attainment
    return [
        output.time_text(span.at),
        format_duration(span.span_s),
        str(span.requests),
        str(span.failed),
        str(span.refused),
        str(span.tokens),
        output.NOTHING if attainment is None else f"{100 * attainment:.1f}",
        duration_text(span.ttft_p50_s),
        duration_text(span.ttft_p99_s),
        duration_text(span.tbt_p50_s),
        duration_text(span.tbt_p99_s),
        output.lateness_text(span.lateness) or output.NOTHING,
    ]


def _stage_rows(sums: ModelSpan) -> list[list[str]]:
    """Return a model's rows of the breakdown, no rows without a first token."""
    num = sums.first_tokens
    if not num:
        return []
    times = (("first token", sums.first_token), ("between tokens", sums.between_tokens))
    return [
        [
            sums.model,
            str(num),
            name,
            *(_mean_text(seconds, num) for seconds in (stages.total_s, *stages.by_name().values())),
        ]
        for name, stages in times
    ]


def _mean_text(total_s: float, num: int) -> str:
    return duration_text(total_s / num if total_s > num * 1e-6 else None)


def _request_row(request: RequestRecord) -> list[str]:
    return [
        output.time_text(request.arrived_at),
        request.request_id,
        request.model,
        str(request.num_prompt_tokens),
        str(request.num_output_tokens),
        str(request.num_output_tokens - request.num_tokens_in_time),
        duration_text(request.ttft_s),
        duration_text(request.tbt_p99_s),
        format_duration(request.total_s),
        request.finish_reason,
    ]


def _switch_row(switch: Switch) -> list[str]:
    return [
        output.time_text(switch.at),
        str(switch.device),
        switch.model,
        switch.previous or output.NOTHING,
        *(format_duration(getattr(switch, f"{stage}_s")) for stage in ("total", *SWITCH_STAGES)),
        size_text(switch.moved_bytes),
    ]


def events(
    ctx: typer.Context,
    follow: FollowOption = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, help="How many past events at most.")
    ] = 50,
    as_json: JsonLinesOption = False,
) -> None:
    """Show failures, restarts and other notable events."""
    with open_client(ctx) as client:
        past = client.events(limit=limit)
        if as_json and not follow:
            output.print_json(past)
            return
        for event in past:
            _print_event(event, as_json)
        if follow:
            for event in client.follow_events(after=past[-1].id if past else 0):
                _print_event(event, as_json)


def logs(
    ctx: typer.Context,
    follow: FollowOption = False,
    lines: Annotated[int, typer.Option("--lines", min=0, help="How many past lines.")] = 100,
    process: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Only one process's lines, such as frontend-0 or worker-0."
        ),
    ] = None,
    as_json: JsonLinesOption = False,
) -> None:
    """Print the log of the daemon and its processes."""
    with open_client(ctx) as client:
        read = client.logs(lines, process, follow)
        if as_json and not follow:
            output.print_json(list(read))
            return
        for line in read:
            if as_json:
                output.print_json_line(line)
            else:
                output.print_line(f"{line.process} | {line.line}")


def _print_event(event: Event, as_json: bool) -> None:
    if as_json:
        output.print_json_line(event)
        return
    parts = [output.time_text(event.at), f"{event.level:<7}", event.kind, event.subject]
    output.print_styled([*filter(None, parts), event.message], style_of=event.level)


def batches(
    ctx: typer.Context,
    with_ended: Annotated[bool, typer.Option("--all", help="Include ended batches.")] = False,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many batches at most.")
    ] = 100,
    as_json: JsonOption = False,
) -> None:
    """Show the batches of clients, and why one stands still; the latest first."""
    with open_client(ctx) as client:
        found = client.batches(limit, ended=with_ended)
    if as_json:
        output.print_json(found)
        return
    output.print_table(_COLUMNS, [_row(batch) for batch in found])
    if not found:
        say("no batches" if with_ended else "no batches under way: --all shows ended batches too")


def _row(batch: BatchInfo) -> list[str]:
    return [
        batch.id,
        batch.key or output.NOTHING,
        ",".join(batch.models) or output.NOTHING,
        batch.state,
        str(batch.num_requests),
        str(batch.num_completed),
        str(batch.num_failed),
        output.time_text(batch.created_at),
        batch.reason or output.NOTHING,
    ]


def usage(
    ctx: typer.Context,
    since_s: Annotated[
        float | None,
        typer.Option(
            "--since",
            metavar="DURATION",
            parser=duration_s,
            help="Length of the period, such as 1h or 30d, in whole hours.  [default: 1d]",
        ),
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Comma-separated values, one row per model and key.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Show tokens, GPU time and energy by model and API key, and the devices' work."""
    if as_csv and as_json:
        raise UsageError("--csv and --json exclude each other", "give one of the two")
    with open_client(ctx) as client:
        found = client.usage(_DAY_S if since_s is None else since_s)
    if as_json:
        output.print_json(found)
    elif as_csv:
        _print_csv(found.uses)
    else:
        output.print_table(_USE_COLUMNS, [_use_row(use) for use in found.uses])
        output.print_line("")
        output.print_table(_DEVICE_COLUMNS, [_device_row(device) for device in found.devices])


def print_fragmentation(devices: Sequence[DeviceUse]) -> None:
    """Print the use of the devices' host KV caches, nothing without host KV."""
    rows = [_fragmentation_row(device) for device in devices if device.kv_host_slab_bytes]
    if rows:
        output.print_line("")
        output.print_table(_FRAGMENTATION_COLUMNS, rows)


def _print_csv(uses: Sequence[UseInfo]) -> None:
    writer = csv.DictWriter(sys.stdout, list(UseInfo.model_fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(use.model_dump() for use in uses)


def _use_row(use: UseInfo) -> list[str]:
    return [
        use.model,
        use.key_name or use.api_key or output.NOTHING,
        str(use.num_requests),
        str(use.num_prompt_tokens),
        str(use.num_output_tokens),
        format_duration(use.gpu_s),
        format_energy(use.energy_j) if use.energy_j else output.NOTHING,
    ]


def _device_row(use: DeviceUse) -> list[str]:
    return [
        str(use.device),
        format_duration(use.seconds),
        *(
            f"{format_duration(part_s)} ({100 * part_s / use.seconds:.0f}%)" if use.seconds else ""
            for part_s in (use.computing_s, use.switching_s)
        ),
        output.NOTHING if use.energy_j is None else format_energy(use.energy_j),
    ]


def _fragmentation_row(use: DeviceUse) -> list[str]:
    share = use.kv_host_fragmentation or 0.0
    return [
        str(use.device),
        size_text(use.kv_host_bytes),
        size_text(use.kv_host_slab_bytes),
        f"{100 * share:.1f}%",
    ]
