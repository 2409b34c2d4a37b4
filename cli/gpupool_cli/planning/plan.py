"""``gpupool plan``: whether a load fits a box, and remedies, before the box is bought."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import ExitCode
from gpupool_cli.options import JsonOption, duration_s, open_client
from gpupool_cli.output import print_json
from gpupool_cli.planning.inputs import (
    EngineLoadOption,
    EngineMemoryOption,
    EnginesLimitOption,
    FarShareOption,
    Inputs,
    KvHostOption,
    ModelCacheOption,
    host_wishes,
    make_inputs,
    models_of_file,
    registered_models,
)
from gpupool_cli.planning.view import Planned, PlanProgress, plan_document, print_plan
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.domain import RequestRecord
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import parse_box, parse_groups
from gpupoold.sim.planner.groups import GroupQuestion, choose_groups
from gpupoold.sim.planner.models import measured_engines, place
from gpupoold.sim.planner.plan import PlanQuestion, check_question, make_plan

REGISTERED, RECORDED, AUTO = "registered", "recorded", "auto"


def plan(
    ctx: typer.Context,
    devices: Annotated[
        str, typer.Option(help="The box, such as 4xA10, 16xH800 or 2x4xH800 (groups of four).")
    ],
    models: Annotated[
        str,
        typer.Option(
            metavar="FILE|registered",
            help="A TOML file of models, or `registered` for the models of the running daemon.",
        ),
    ],
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|recorded",
            help="Requests to plan for: a .csv or .csv.gz file, or the running daemon's history.",
        ),
    ] = None,
    rps: Annotated[
        str | None,
        typer.Option(help="Requests per second of each model: one number, or one per model."),
    ] = None,
    target: Annotated[
        float, typer.Option(help="Required share of tokens in time, above 0 and up to 1.")
    ] = 0.99,
    policies: Annotated[
        str, typer.Option("--policy", help="Policies to compare, separated by commas.")
    ] = "gpupool",
    groups: Annotated[
        str | None,
        typer.Option(
            metavar="GROUPS|auto",
            help="Groups of GPUs that run each model together: 2x4 for two groups of four, "
            "1x4+4x1 for one and four single GPUs, `auto` for the best grouping.",
        ),
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(
            parser=duration_s,
            metavar="DURATION",
            help="Duration of the load; of a recording, the busiest period of that duration.",
        ),
    ] = None,
    kv_host: KvHostOption = None,
    model_cache: ModelCacheOption = None,
    engine_memory: EngineMemoryOption = None,
    engines_limit: EnginesLimitOption = None,
    engine_load: EngineLoadOption = None,
    far_share: FarShareOption = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same requests.")] = 0,
    runs: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=100,
            help="Draws of a random load; the target must be reached in each.",
        ),
    ] = 3,
    as_json: JsonOption = False,
) -> None:
    """Find out whether models and their load fit a box, and how many devices they need.

    All answers come from simulations with the daemon's own scheduling. Exit status 0 if the load
    fits, 1 if not, 2 if the question has no answer, as for a model larger than a device.
    """
    started_s = time.monotonic()
    names = output.names(policies)
    check_question(target, names)
    box = parse_box(devices)
    if groups not in (None, AUTO):
        box = box.split(parse_groups(groups))
    inputs = _inputs(ctx, models, trace, rps, duration)
    host = host_wishes(kv_host, model_cache, engine_memory, engines_limit, engine_load, far_share)
    if engine_memory is None:
        measured = measured_engines(inputs.models, box)
        host = replace(host, own_engine_bytes=tuple(measured.items()))
    max_lens = {model.name: model.max_len for model in inputs.models if model.max_len is not None}
    choice = None
    if groups == AUTO:
        asked = GroupQuestion(
            *(box, inputs.load, inputs.models, target, names[0], seed), max_lens=max_lens, host=host
        )
        with PlanProgress() as progress:
            choice = choose_groups(asked, progress.show)
        box = choice.box
    placed = place(inputs.models, box)
    question = PlanQuestion(
        box=box,
        models=placed.models,
        load=inputs.load,
        target=target,
        policies=names,
        seeds=tuple(range(seed, seed + runs)),
        max_lens=max_lens,
        models_on=lambda other: place(inputs.models, other).models,
        by_degree=placed.by_degree,
        host=host,
    )
    with PlanProgress() as progress:
        answers = make_plan(question, progress.show)
    wall_s = time.monotonic() - started_s
    planned = Planned(question, answers, placed.basis, inputs.models, inputs.notes, wall_s, choice)
    if as_json:
        print_json(plan_document(planned))
    else:
        print_plan(planned)
    raise typer.Exit(ExitCode.OK if answers.fits else ExitCode.FAILED)


def _inputs(
    ctx: typer.Context, models: str, trace: str | None, rps: str | None, duration: float | None
) -> Inputs:
    """Read the models and the load, from files or from the daemon."""
    if trace is not None and rps is not None:
        raise UsageError("both --trace and --rps: give one of the two")
    example = "0.1, or 0.1,0.2,0.5 for three models"
    rates = None if rps is None else output.numbers("--rps", rps, float, example)
    given = None if models == REGISTERED else models_of_file(Path(models))
    if given is not None and trace != RECORDED:
        return make_inputs(given, trace, rates, duration)
    with open_client(ctx) as client:
        registered = client.models()
        found = given or registered_models(registered)
        history = _by_model(client.requests(), registered) if trace == RECORDED else None
    return make_inputs(found, trace, rates, duration, history)


def _by_model(
    requests: Iterable[RequestRecord], models: Iterable[ModelInfo]
) -> list[RequestRecord]:
    """Return the requests, those of presets and adapters under the names of their models."""
    parents = {
        one: model.name
        for model in models
        for one in [x.name for x in model.presets] + [x.name for x in model.adapters]
    }
    return [
        replace(request, model=parents.get(request.model, request.model)) for request in requests
    ]
