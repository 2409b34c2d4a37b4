"""Options of a simulated box, and the models and load of ``gpupool plan`` with notes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from gpupool_cli.options import duration_s
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import RequestRecord, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.host import HostWishes
from gpupoold.sim.planner.load import PlanLoad, history_load, poisson_load, trace_load
from gpupoold.sim.planner.models import (
    PlannedModel,
    read_checkpoint,
    read_family,
    read_models,
    read_shape,
)
from gpupoold.units import parse_size_bytes


def size_bytes(text: str) -> int:
    """Bytes in an option's value.

    Raises typer.BadParameter: it is no size; Typer adds the option's name.
    """
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class EngineSizes(NamedTuple):
    """Bytes of an engine, and of the engines of some models."""

    num_bytes: int
    own_bytes: tuple[tuple[str, int], ...]


def engine_memory(text: str) -> EngineSizes:
    """Parse the memory of engines: ``172MB`` or ``172MB,large-model=900MB``.

    Raises typer.BadParameter: a part is no size; Typer adds the option's name.
    """
    first, *others = text.split(",")
    pairs = [part.partition("=") for part in others]
    if not all(separator for _, separator, _ in pairs):
        raise typer.BadParameter(f"{text!r}: write for example 172MB,large-model=900MB")
    own = tuple((name.strip(), size_bytes(size.strip())) for name, _, size in pairs)
    return EngineSizes(size_bytes(first.strip()), own)


def _size_option(name: str, text: str) -> Any:
    return typer.Option(name, parser=size_bytes, metavar="SIZE", help=text)


KvHostOption = Annotated[
    int | None,
    _size_option(
        "--kv-host", "Host memory for KV of each GPU, as memory.kv_host; default: as the daemon."
    ),
]
PrefixCacheOption = Annotated[
    int | None,
    _size_option(
        "--prefix-cache",
        "Host memory for KV of ended requests; default: what other KV leaves. 0: none.",
    ),
]
ModelCacheOption = Annotated[
    int | None,
    _size_option(
        "--model-cache", "Host memory for models, as memory.model_cache; default: as the daemon."
    ),
]
EngineMemoryOption = Annotated[
    EngineSizes | None,
    typer.Option(
        "--engine-memory",
        parser=engine_memory,
        metavar="SIZE[,MODEL=SIZE...]",
        help="Memory of an engine outside the pages, as `gpupool show` says; default: 172MB, "
        "but 0B (free) in most presets.",
    ),
]
EnginesLimitOption = Annotated[
    int | None,
    _size_option(
        "--engines-limit",
        "Limit for engines and libraries of a GPU, as memory.engines; default: as the daemon.",
    ),
]
EngineLoadOption = Annotated[
    float | None,
    typer.Option(
        "--engine-load",
        parser=duration_s,
        metavar="DURATION",
        help="Time to load an engine that was evicted; default: 13s.",
    ),
]

FarShareOption = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        min=0.01,
        max=1.0,
        help="Two NUMA nodes, with this share of the rate for copies of weights from the other; "
        "default: one node.",
    ),
]


def host_wishes(
    kv_host: int | None,
    model_cache: int | None,
    engines: EngineSizes | None,
    engines_limit: int | None,
    engine_load: float | None,
    far_share: float | None,
    prefix_cache: int | None = None,
) -> HostWishes:
    """Return the budgets of a simulated box as given by options."""
    num_bytes, own_bytes = (None, ()) if engines is None else engines
    return HostWishes(
        kv_host,
        model_cache,
        num_bytes,
        engines_limit,
        engine_load,
        prefix_cache,
        own_bytes,
        far_share,
    )


class Models(NamedTuple):
    """Models to plan for, and notes on the choice."""

    models: tuple[PlannedModel, ...]
    notes: tuple[str, ...] = ()


class Inputs(NamedTuple):
    """Models and load of a plan, with notes for the report."""

    models: tuple[PlannedModel, ...]
    load: PlanLoad
    notes: tuple[str, ...]


def models_of_file(path: Path) -> Models:
    """Return the models of a TOML file. Raises UsageError."""
    return Models(read_models(path))


def registered_models(infos: Sequence[ModelInfo]) -> Models:
    """Return a daemon's models, without failed models.

    Raises UsageError: no model is left, or a model's sizes are unknown.
    """
    failed = [info.name for info in infos if info.state == "failed"]
    models = tuple(_planned(info) for info in infos if info.state != "failed")
    if not models:
        raise UsageError("the daemon has no usable models", "`gpupool add-model NAME` adds a model")
    return Models(models, tuple(f"{name} failed to load and is left out." for name in failed))


def make_inputs(
    found: Models,
    trace: str | None,
    rates: Sequence[float] | None,
    duration_s: float | None,
    history: Sequence[RequestRecord] | None = None,
) -> Inputs:
    """Add the load: ``history`` if present, else the file ``trace``, else rates.

    Raises UsageError: there is no load, rates are too many or impossible, or the file has an error.
    """
    models = found.models
    names = [model.name for model in models]
    if history is not None:
        load, num_left_out = history_load(history, names, duration_s)
        left_out = (
            f"Recorded requests left out, without tokens or of removed models: {num_left_out:,}."
        )
        return Inputs(models, load, (*found.notes, *([left_out] if num_left_out else [])))
    if trace is not None:
        requests = trace_load(Path(trace), names, duration_s)
        drawn = (
            "The trace names no models: a draw assigned the requests to models, most to few of "
            "them."
        )
        notes = [drawn] if requests.spread_over else []
        return Inputs(models, requests, (*found.notes, *notes))
    by_name = dict(zip(names, _rates(models, rates), strict=True))
    return Inputs(models, poisson_load(by_name, duration_s), found.notes)


def _rates(models: Sequence[PlannedModel], rates: Sequence[float] | None) -> Sequence[float]:
    """Return the requests per second of each model. Raises UsageError if unknown."""
    if rates is None:
        known = [model.rps for model in models if model.rps is not None]
        missing = [model.name for model in models if model.rps is None]
        if missing:
            raise UsageError(
                f"the load of {missing[0]} is unknown" if known else "no load to plan for",
                "give --rps R, --trace FILE, --trace recorded, or rps in the file of models",
            )
        return known
    if len(rates) == 1:
        return list(rates) * len(models)
    if len(rates) != len(models):
        raise UsageError(
            f"--rps has {len(rates)} rates for {len(models)} models",
            "give one rate for all models, or a rate for each of "
            f"{', '.join(model.name for model in models)}",
        )
    return rates


def _planned(info: ModelInfo) -> PlannedModel:
    shape, problem = None, ""
    weight_bytes, kv_bytes_per_token = info.weight_bytes, info.kv_bytes_per_token
    try:
        shape = read_shape(Path(info.path), info.dtype)
        weight_bytes = weight_bytes or read_checkpoint(Path(info.path), info.dtype).weight_bytes
        if info.generates:
            kv_bytes_per_token = kv_bytes_per_token or shape.kv_bytes_per_token
    except UsageError as error:
        problem = error.message
    # A model with attention in both directions has no KV.
    if not weight_bytes or (info.generates and not kv_bytes_per_token):
        raise UsageError(f"{info.name}: not loaded yet, so the sizes are unknown, and {problem}")
    family = ""
    if not (info.adapters or any(key.startswith("speculative_config") for key in info.engine)):
        family = read_family(Path(info.path), info.dtype, info.max_model_len, info.engine)
    return PlannedModel(
        info.name,
        Targets(info.ttft_s, info.tbt_s),
        weight_bytes,
        kv_bytes_per_token,
        shape,
        problem,
        tuple(info.latencies),
        info.max_model_len,
        generates=info.generates,
        family=family,
        engine_bytes=info.engine_bytes,
    )
