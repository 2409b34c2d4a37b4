"""Notes of a plan in sentences: the amount of simulation, and uncertain inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from gpupoold.latency.hardware import hardware
from gpupoold.sim.planner.models import Basis, PlannedModel
from gpupoold.sim.planner.plan import Plan, PlanQuestion
from gpupoold.sim.planner.text import names_text
from gpupoold.units import format_duration

_FEW_REQUESTS = 100


def notes_on(
    question: PlanQuestion, plan: Plan, basis: Mapping[str, Basis], models: Sequence[PlannedModel]
) -> list[str]:
    """The sentences, most important first."""
    return [
        *_size(question, plan),
        *_step_times(question, basis, models),
        *_left_out(question, plan),
        "A token is in time by its own deadline, fixed when its request arrives: a gap above the "
        "TBT target is no miss while tokens before it were early.",
    ]


def _size(question: PlanQuestion, plan: Plan) -> Iterator[str]:
    shown, load = plan.forecast, question.load
    stretch = format_duration(load.duration_s)
    num_runs = len(plan.attained.by_run)
    how = f"{num_runs} runs of {stretch} each with different draws" if num_runs > 1 else (
        f"one run of {stretch}" + ("" if load.is_random else ", as recorded")
    )  # fmt: skip
    yield (
        f"Does it fit rests on {shown.num_requests:,} simulated requests: {how}. All answers "
        f"together took {plan.num_runs} runs."
    )
    if shown.num_requests < _FEW_REQUESTS:
        yield f"Fewer than {_FEW_REQUESTS} requests are little: take it as a rough guess."
    if shown.num_late:
        yield (
            f"Requests without a token when the runs ended: {shown.num_late:,}; they count as "
            "missed, but no percentile has them."
        )


def _step_times(
    question: PlanQuestion, basis: Mapping[str, Basis], models: Sequence[PlannedModel]
) -> Iterator[str]:
    gpu, num_models = question.box.gpu, len(basis)
    by_basis: dict[Basis, list[str]] = {"measured": [], "published": [], "scaled": []}
    for name, kind in basis.items():
        by_basis[kind].append(name)
    if names := by_basis["measured"]:
        yield f"Step times of {names_text(names, num_models)}: measured by the daemon on {gpu}."
    if names := by_basis["published"]:
        yield f"Step times of {names_text(names, num_models)}: published measurements on {gpu}."
    if names := by_basis["scaled"]:
        yield (
            f"Step times of {names_text(names, num_models)}: scaled from other models or GPUs, "
            f"nobody measured them on {gpu}; often 10 % off, at worst about 30 %."
        )
    elsewhere: dict[str, list[str]] = {}
    for model in models:
        if model.measured is not None and basis[model.name] != "measured":
            elsewhere.setdefault(model.measured.device, []).append(model.name)
    for device, names in elsewhere.items():
        named = names_text(names, num_models)
        yield f"What was measured of {named} on {device} says nothing of {gpu}."
    if not hardware(gpu).is_pcie_measured and len(by_basis["measured"]) < num_models:
        yield f"The host link of {gpu} is taken from GPUs with the same kind of link."


def _left_out(question: PlanQuestion, plan: Plan) -> Iterator[str]:
    shown = plan.forecast
    if shown.num_refused:
        yield (
            "Prompts longer than their model can take on this device: "
            f"{shown.num_refused:,}; the daemon refuses them, so they are left out."
        )
    if shown.num_cut:
        yield f"Answers cut at the longest their model can give: {shown.num_cut:,}."
    idle = [name for name in question.models if name not in shown.models]
    if idle:
        yield f"No requests, so no answer, for {names_text(idle, len(question.models))}."
