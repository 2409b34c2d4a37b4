"""Inputs of ``gpupool plan``: models and their load, with notes on what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import RequestRecord, Targets
from gpupoold.errors import UsageError
from gpupoold.sim.planner.file import read_models
from gpupoold.sim.planner.load import (
    PlanLoad,
    RecordedRequest,
    history_load,
    poisson_load,
    trace_load,
)
from gpupoold.sim.planner.models import PlannedModel, read_checkpoint, read_shape


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

    Raises:
        UsageError: no model is left, or a model's sizes are unknown.
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

    Raises:
        UsageError: there is no load, rates are too many or impossible, or the file has an error.
    """
    models = found.models
    names = [model.name for model in models]
    if history is not None:
        past = [
            RecordedRequest(one.model, one.arrived_at, one.num_prompt_tokens, one.num_output_tokens)
            for one in history
        ]
        load, num_left_out = history_load(past, names, duration_s)
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
    )
