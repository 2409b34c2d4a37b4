"""``add-model``, ``add-adapter`` and ``add-preset``: register, and wait until models can serve."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gpupool_cli import options, output
from gpupool_cli.diagnostics import say
from gpupool_cli.models import print_model
from gpupool_cli.output import numbers
from gpupool_cli.progress import ProgressView
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    AddPresetRequest,
    ModelInfo,
    Progress,
)
from gpupoold.domain import DEFAULT_TBT_S, DEFAULT_TTFT_S
from gpupoold.errors import Failed, UsageError
from gpupoold.json_values import check_json_text
from gpupoold.units import format_bytes


def add_model(
    ctx: typer.Context,
    name: options.NewNameArgument,
    source: Annotated[
        str | None,
        typer.Option(metavar="PATH|HF-ID", help="The checkpoint; default: NAME is looked up."),
    ] = None,
    revision: options.RevisionOption = None,
    ttft: options.TtftOption = None,
    tbt: options.TbtOption = None,
    pace: options.PaceOption = None,
    max_len: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Longest prompt plus answer, in tokens.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="D", help="Weight type, such as bfloat16.")
    ] = "auto",
    alias: Annotated[
        list[str] | None,
        typer.Option("--alias", metavar="A", help="A further name; may be repeated."),
    ] = None,
    engine: options.EngineOption = None,
    devices: Annotated[
        str | None,
        typer.Option(metavar="N,...", help="Devices for its engines; default: as scheduled."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the model without adding the model.")
    ] = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Add the model only if its answers are exact."),
    ] = False,
    detach: Annotated[
        bool,
        typer.Option("--detach", help="Return after the checks; the daemon downloads and loads."),
    ] = False,
    on_fleet: Annotated[
        bool, typer.Option("--fleet", help="Let the fleet place the model where it fits.")
    ] = False,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", min=1, max=1000, metavar="N", help="With --fleet: at least so many nodes."
        ),
    ] = 1,
    as_json: options.JsonOption = False,
) -> None:
    """Register a model: find, download, check and load it.

    Without --ttft and --tbt the targets are 10s and 100ms. An interrupted download is continued by
    the same command.
    """
    if check and detach:
        raise UsageError("--check and --detach exclude each other", "give one of the two")
    if as_json and (detach or on_fleet):
        raise UsageError("--json waits for the model", "leave out --detach and --fleet")
    request = AddModelRequest(
        name=name,
        source=None if source is None else as_daemon_sees(source),
        revision=revision,
        dtype=dtype,
        max_model_len=max_len,
        ttft_s=DEFAULT_TTFT_S if ttft is None else ttft,
        tbt_s=DEFAULT_TBT_S if tbt is None else tbt,
        aliases=alias or [],
        engine=options.read_options(engine or ()),
        pace=pace or "",
        devices=[] if devices is None else [*numbers("--devices", devices, int, "0,1")],
        check_only=check,
        detach=detach,
        verify=verify,
    )
    if on_fleet:
        _add_to_fleet(ctx, request, replicas)
        return
    with options.open_client(ctx) as client:
        model = follow(request.name, client.add_model(request))
    if as_json:
        output.print_json(model)
    elif model is None:
        say(f"{name}: accepted; `gpupool ps` shows the progress, `gpupool events` the result")
    elif check:
        say(f"{model.name}: can be served; not added")
        print_model(model, is_added=False)
    else:
        say(f"{model.name}: {model.state}, {format_bytes(model.weight_bytes)} of weights")


def _add_to_fleet(ctx: typer.Context, request: AddModelRequest, least_replicas: int) -> None:
    """Let the fleet place a model. Raises UsageError: an option is for one daemon alone."""
    from gpupoold.fleet import operations
    from gpupoold.fleet.cluster import FleetSpec

    if request.devices or request.check_only:
        raise UsageError("--devices and --check are for one daemon", "leave them out with --fleet")
    operations.add_model(options.socket_path_of(ctx), FleetSpec(request, least_replicas))
    say(f"{request.name}: the fleet places the model; `gpupool fleet status` shows where")


def follow(name: str, steps: Iterator[Progress]) -> ModelInfo | None:
    """Show the steps of an addition; return the model at the end, None if the daemon goes on."""
    with ProgressView(name) as view:
        try:
            for progress in steps:
                if progress.model is not None or progress.stage == "detached":
                    if progress.note:
                        view.tell(progress.note)
                    return progress.model
                view.show(progress)
        except KeyboardInterrupt:
            if view.has_downloaded:
                view.tell("not added; the downloaded part is kept: repeat the command to go on")
            raise
    raise Failed(f"no answer about {name!r}", "see `gpupool logs`")


def as_daemon_sees(source: str) -> str:
    """Return a source with a path relative to here made absolute.

    The daemon's working folder differs.
    """
    path = Path(source).expanduser()
    return str(path.resolve()) if path.exists() else source


def add_adapter(
    ctx: typer.Context,
    name: options.NewNameArgument,
    base: options.BaseOption,
    source: Annotated[
        str | None,
        typer.Option(
            metavar="PATH|HF-ID", help="The adapter in peft's format; default: NAME is looked up."
        ),
    ] = None,
    revision: options.RevisionOption = None,
    ttft: options.TtftOption = None,
    tbt: options.TbtOption = None,
    check: Annotated[
        bool, typer.Option("--check", help="Check the adapter without adding the adapter.")
    ] = False,
) -> None:
    """Add a LoRA adapter: a further name of a model, whose weights are shared.

    The model serves meanwhile, and its answers go on. Without --ttft and --tbt the targets are the
    model's. `gpupool rm NAME` removes the adapter.
    """
    request = AddAdapterRequest(
        name=name,
        base=base,
        source=None if source is None else as_daemon_sees(source),
        revision=revision,
        ttft_s=ttft,
        tbt_s=tbt,
        check_only=check,
    )
    with options.open_client(ctx) as client:
        model = follow(name, client.add_adapter(request))
    assert model is not None
    if check:
        say(f"{name}: can be added to {model.name}; not added")
        return
    rank = next((adapter.rank for adapter in model.adapters if adapter.name == name), 0)
    say(f"{name}: an adapter of {model.name}, rank {rank}")


def add_preset(
    ctx: typer.Context,
    name: options.NewNameArgument,
    base: options.BaseOption,
    default: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A default for a field of requests, such as temperature=0.2 or "
            "chat_template_kwargs.enable_thinking=true; may be repeated.",
        ),
    ] = None,
    ttft: options.TtftOption = None,
    tbt: options.TbtOption = None,
) -> None:
    """Add a preset: a name with other defaults and targets for requests of a model.

    A value is JSON, or else text. `system_prompt` is a system message for conversations without
    one. `gpupool rm NAME` removes the preset.
    """
    request = AddPresetRequest(
        name=name, base=base, defaults=read_defaults(default or ()), ttft_s=ttft, tbt_s=tbt
    )
    with options.open_client(ctx) as client:
        model = client.add_preset(request)
    say(f"{name}: a preset of {model.name}")


def read_defaults(given: Iterable[str]) -> dict[str, Any]:
    """Return the defaults by the names of fields.

    Raises:
        UsageError: a default has no value or is repeated.
        Refused: a value is no JSON, for example an infinite number.
    """
    defaults: dict[str, Any] = {}
    for name, text in options.read_pairs(given, "--set", "temperature=0"):
        check_json_text(name, text)
        options.set_once(defaults, name, _value(text), "--set")
    return defaults


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
