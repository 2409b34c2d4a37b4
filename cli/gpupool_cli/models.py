"""``list``, ``show``, ``set``, ``host``, ``rm``, ``unload``, ``cancel``: models, and requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import options, output
from gpupool_cli.diagnostics import report, say
from gpupoold.api.client import AdminClient
from gpupoold.api.schemas import ModelUsage
from gpupoold.api.schemas_models import ModelInfo, SetModelRequest, graphs_text, load_text
from gpupoold.domain import AdapterInfo, Preset, RemoveMode
from gpupoold.errors import DaemonNotRunning, GpupoolError, UsageError
from gpupoold.units import format_bytes, format_duration

_SHOWN_BATCH = 8
_MAX_SHOWN_VALUE = 100
_COLUMNS = output.columns("NAME, STATE*, TTFT>, TBT>, DTYPE, SIZE>, ALIASES")


def list_models(
    ctx: typer.Context,
    as_json: options.JsonOption = False,
    quiet: Annotated[
        bool, typer.Option("-q", "--quiet", help="Print names only, one per line.")
    ] = False,
) -> None:
    """List the registered models."""
    if as_json and quiet:
        raise UsageError("--json and --quiet exclude each other", "give one of the two")
    with options.open_client(ctx) as client:
        models = client.models()
    if as_json:
        output.print_json(models)
    elif quiet:
        for model in models:
            output.print_line(model.name)
    else:
        output.print_table(_COLUMNS, [_row(model) for model in models])
        if not models:
            say("no models yet: `gpupool add-model NAME` adds a model")


def show(
    ctx: typer.Context, name: options.NameArgument, as_json: options.JsonOption = False
) -> None:
    """Show everything known about one model."""
    with options.open_client(ctx) as client:
        model = client.model(name)
    if as_json:
        output.print_json(model)
    else:
        print_model(model)


def set_model(
    ctx: typer.Context,
    name: options.NameArgument,
    ttft: options.TtftOption = None,
    tbt: options.TbtOption = None,
    pace: options.PaceOption = None,
    add_alias: Annotated[
        list[str] | None,
        typer.Option("--add-alias", metavar="ALIAS", help="A further name; may be repeated."),
    ] = None,
    remove_alias: Annotated[
        list[str] | None,
        typer.Option("--remove-alias", metavar="ALIAS", help="Drop a name; may be repeated."),
    ] = None,
    engine: options.EngineOption = None,
    remove_engine: Annotated[
        list[str] | None,
        typer.Option("--remove-engine", metavar="KEY", help="Drop an option; may be repeated."),
    ] = None,
) -> None:
    """Change a model's targets, pace, aliases and options at once.

    For other options of the engine, a new engine is built beside the present engine and takes over
    the answers in progress.
    """
    request = SetModelRequest(
        ttft_s=ttft,
        tbt_s=tbt,
        pace=pace,
        add_aliases=add_alias or [],
        remove_aliases=remove_alias or [],
        engine={**options.read_options(engine or ()), **dict.fromkeys(remove_engine or ())},
    )
    if request == SetModelRequest():
        raise UsageError(
            f"no change given for {name!r}",
            "give --ttft, --tbt, --pace, --add-alias, --remove-alias, --engine or --remove-engine",
        )
    with options.open_client(ctx) as client:
        model = client.set_model(name, request)
    aliases = f", aliases {', '.join(model.aliases)}" if model.aliases else ""
    say(
        f"{model.name}: ttft {format_duration(model.ttft_s)},"
        f" tbt {format_duration(model.tbt_s)}{aliases}"
    )


def rm(
    ctx: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME...",
            parser=options.model_name,
            help="Names or aliases of registered models.",
            autocompletion=options.complete_model_name,
        ),
    ],
    drain: Annotated[
        bool, typer.Option("--drain", help="Wait until the model's live requests have ended.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Abort the model's live requests.")
    ] = False,
) -> None:
    """Remove models; their checkpoints stay on disk.

    A model with live requests is refused unless --drain or --force is given.
    """
    mode = _mode(drain, force)
    with options.open_client(ctx) as client:
        failures = [error for name in names if (error := _remove(client, name, mode))]
    if failures:
        # Each error was reported when it happened; the first error decides the status.
        raise typer.Exit(failures[0].exit_code)


def _mode(drain: bool, force: bool) -> RemoveMode:
    if drain and force:
        raise UsageError("--drain and --force exclude each other", "give one of the two")
    return "drain" if drain else "force" if force else "refuse"


def print_model(model: ModelInfo, *, is_added: bool = True) -> None:
    """Print a model as ``name value`` lines on stdout; one that is not added has no state."""
    fields = {
        "name": model.name,
        "state": model.state if is_added else "",
        "error": model.error,
        "source": model.source,
        "revision": model.revision or "",
        "path": _path_text(model),
        "architecture": model.architecture,
        "tasks": ", ".join(model.tasks),
        "dtype": model.dtype,
        "weights": output.size_text(model.weight_bytes),
        "kv per token": output.size_text(model.kv_bytes_per_token),
        "max length": "" if model.max_model_len is None else f"{model.max_model_len} tokens",
        "ttft": format_duration(model.ttft_s),
        "tbt": format_duration(model.tbt_s),
        "pace": model.pace,
        "aliases": ", ".join(model.aliases),
        **_chat_fields(model),
        **{f"preset {preset.name}": _preset_text(preset) for preset in model.presets},
        **{
            f"adapter {info.name}": ", ".join([f"rank {info.rank}", *_own_targets(info), info.path])
            for info in model.adapters
        },
        **{f"engine {name}": _shortened(value) for name, value in sorted(model.engine.items())},
        "engines": "" if model.usage is None else hosting_text(model),
        **{
            f"load on device {engine.device}": load_text(engine.load)
            for engine in (model.usage.engines if model.usage else ())
        },
        **{
            f"graphs on device {engine.device}": graphs_text(engine.graphs)
            for engine in (model.usage.engines if model.usage else ())
            if engine.graphs.num_late or engine.graphs.num_left
        },
        **_memory_fields(model),
        "drafts": _draft_text(model.usage),
        "added": output.time_text(model.created_at) if is_added else "",
        **_latency_fields(model),
    }
    output.print_fields({name: value for name, value in fields.items() if value})


def _path_text(model: ModelInfo) -> str:
    """Return the checkpoint's folder, marked if the folder is in a shared Hugging Face cache."""
    is_shared = model.source != model.path and Path(model.path).parent.name == "snapshots"
    return f"{model.path} (shared Hugging Face cache)" if is_shared else model.path


def _chat_fields(model: ModelInfo) -> dict[str, str]:
    """Return the parsers and the chat template, each with the reason."""
    found = {
        "tool parser": model.tool_parser,
        "reasoning parser": model.reasoning_parser,
        "chat template": model.chat_template,
    }
    return {
        name: f"{other.name or 'none'} ({other.reason})" for name, other in found.items() if other
    }


def _other_names(model: ModelInfo) -> str:
    """Return the aliases, then the presets and adapters with their kind."""
    presets = [f"{preset.name} (preset)" for preset in model.presets]
    adapters = [f"{adapter.name} (adapter)" for adapter in model.adapters]
    return ", ".join([*model.aliases, *presets, *adapters]) or output.NOTHING


def _preset_text(preset: Preset) -> str:
    parts = [f"{name}={json.dumps(value)}" for name, value in preset.defaults.items()]
    return _shortened(", ".join([*parts, *_own_targets(preset)])) or "no other defaults"


def _own_targets(further: Preset | AdapterInfo) -> list[str]:
    targets = {"ttft": further.ttft_s, "tbt": further.tbt_s}
    return [
        f"{name} {format_duration(seconds)}"
        for name, seconds in targets.items()
        if seconds is not None
    ]


def _shortened(value: str) -> str:
    """Return the first line of an option's value, for a table."""
    lines = value.splitlines() or [""]
    is_whole = len(lines) == 1 and len(value) <= _MAX_SHOWN_VALUE
    return value if is_whole else f"{lines[0][:_MAX_SHOWN_VALUE]}..."


def _memory_fields(model: ModelInfo) -> dict[str, str]:
    usage = model.usage
    if usage is None:
        return {}
    sizes = {
        "resident": usage.weights_resident_bytes,
        "cached": usage.cached_bytes,
        "kv resident": usage.kv_resident_bytes,
        "kv paused": usage.kv_host_bytes,
    }
    if usage.encoder_bytes:
        sizes["encoder"] = usage.encoder_bytes
    if usage.prefix_saved_bytes:
        sizes |= {"kv saved": usage.prefix_saved_bytes, "kv reused": usage.prefix_hit_bytes}
    if fetched_bytes := usage.prefix_peer_bytes + usage.prefix_file_bytes:
        sizes["kv fetched"] = fetched_bytes
    fields = {name: output.size_text(num_bytes) for name, num_bytes in sizes.items()}
    if usage.unbound_bytes:
        fields["without an engine"] = output.unbound_text(usage.unbound_bytes)
    return fields


def _draft_text(usage: ModelUsage | None) -> str:
    """Return the acceptance of speculative decoding, empty without drafts."""
    if usage is None or usage.drafts is None:
        return ""
    drafts = usage.drafts
    return (
        f"{drafts.num_accepted_tokens:,} of {drafts.num_draft_tokens:,} tokens accepted, "
        f"{drafts.acceptance_length:.2f} tokens per step"
    )


def _latency_fields(model: ModelInfo) -> dict[str, str]:
    """Return measured times of typical steps."""
    latency = model.latency
    if latency is None:
        return {}
    prompt, context = (min(tokens, model.max_model_len or tokens) for tokens in (1000, 500))
    prefill_s = latency.prefill_s([prompt])
    step_s = latency.decode_step_s(_SHOWN_BATCH, _SHOWN_BATCH * context)
    fields = {}
    for name, seconds, batch, fit in (
        ("prefill", prefill_s, f"a prompt of {prompt} tokens", latency.prefill),
        ("decode step", step_s, f"{_SHOWN_BATCH} sequences of {context} tokens", latency.decode),
    ):
        if seconds and fit is not None:  # a pooling model has no decode steps
            quality = f"R2 {fit.r_squared:.3f}, {fit.num_points} points"
            error = f"mean error {100 * fit.mean_relative_error:.2g} %"
            fields[name] = f"{format_duration(seconds)} for {batch} ({quality}, {error})"
    switch_s = format_duration(latency.switch_s(model.weight_bytes))
    bandwidth = output.size_text(round(latency.bandwidth_bytes_per_s))
    fields["switch"] = f"{switch_s} for all weights ({bandwidth}/s)"
    fields["measured"] = f"{output.time_text(latency.measured_at)} on {latency.device}"
    return fields


def _row(model: ModelInfo) -> list[str]:
    return [
        model.name,
        model.state,
        format_duration(model.ttft_s),
        format_duration(model.tbt_s),
        model.dtype,
        output.size_text(model.weight_bytes),
        _other_names(model),
    ]


def _remove(client: AdminClient, name: str, mode: RemoveMode) -> GpupoolError | None:
    """Return the error of removing ``name``, None after success."""
    if mode == "drain":
        say(f"{name}: waiting for the live requests to end")
    try:
        model = client.remove_model(name, mode)
    except DaemonNotRunning:
        raise  # other names would fail the same way
    except GpupoolError as error:
        report(error)
        return error
    # An alias goes with its model, a preset or an adapter alone.
    is_alias = name in model.aliases
    say(f"{model.name} (alias {name}): removed" if is_alias else f"{name}: removed")
    return None


def unload(
    ctx: typer.Context,
    name: options.NameArgument,
    drain: Annotated[
        bool, typer.Option("--drain", help="Refuse new requests and wait for live requests.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End live requests with an error.")
    ] = False,
    keep_host: Annotated[
        bool,
        typer.Option("--keep-host", help="Free devices only; the snapshot stays in host memory."),
    ] = False,
) -> None:
    """Take a model off all devices and out of host memory; the model stays registered.

    The next request loads the model again. Refused while the model has live requests, unless an
    option says how to treat them, and while its snapshot is pinned.
    """
    with options.open_client(ctx) as client:
        freed = client.unload(name, _mode(drain, force), keep_host=keep_host)
    device, host = format_bytes(freed.device_bytes), format_bytes(freed.host_bytes)
    say(f"{freed.name}: freed {device} on devices, {host} of host memory")


def cancel(
    ctx: typer.Context,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="The id in `gpupool top`, or the client's x-request-id or id of the answer.",
        ),
    ],
) -> None:
    """End a live request with an error for its client."""
    with options.open_client(ctx) as client:
        ended = client.cancel(request_id)
    others = f" and {ended.num_requests - 1} more of its client" if ended.num_requests > 1 else ""
    say(
        f"{ended.request_id}{others}: cancelled after {ended.num_output_tokens} tokens of "
        f"{ended.model}"
    )


def host(
    ctx: typer.Context,
    name: options.NameArgument,
    devices: Annotated[
        list[int] | None,
        typer.Argument(metavar="[DEVICE]...", min=0, help="Numbers of devices in `gpupool ps`."),
    ] = None,
    auto: Annotated[
        bool, typer.Option("--auto", help="Leave the choice to the scheduler again.")
    ] = False,
) -> None:
    """Choose the devices that have a model's engine.

    The engine is loaded on these devices, then unloaded from all others, whose answers continue
    on these devices. The choice lasts until another choice or `--auto`.
    """
    if auto == bool(devices):
        raise UsageError(f"{name}: give numbers of devices, or --auto", "see `gpupool ps`")
    with options.open_client(ctx) as client:
        model = client.host(name, devices or ())
        info = client.model(model.name)
    say(f"{info.name}: {hosting_text(info)}")


def hosting_text(model: ModelInfo) -> str:
    """Return the devices of a model's engines with their memory, and the origin of the choice."""
    engines, slots = ([], []) if model.usage is None else (model.usage.engines, model.usage.slots)
    places = ", ".join(
        f"device {engine.device} ({format_bytes(engine.device_bytes)})" for engine in engines
    )
    if slots:
        places = f"none; takes over one of a fine-tune on device {', '.join(map(str, slots))}"
    chosen = ", ".join(map(str, model.devices))
    how = f"by hand: {chosen}" if chosen else "chosen by the scheduler"
    alone = {engine.why_unshared for engine in engines if engine.why_unshared}
    unshared = f"; not for fine-tunes: {', '.join(sorted(alone))}" if alone else ""
    return f"{places or 'on no device'}; {how}{unshared}"
