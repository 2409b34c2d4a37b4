"""Questions to the planner about small models."""

from __future__ import annotations

from dataclasses import replace

from gpupoold.domain import Targets
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.planner.load import poisson_load
from gpupoold.sim.planner.plan import PlanQuestion
from gpupoold.sim.workloads import SimRequest

SMALL_SHAPES = ("Yi-1.5-6B", "Qwen2.5-7B", "Llama-2-7B")


def question(
    devices: str, num_models: int, rps: float, targets: Targets | None = None, **changes: object
) -> PlanQuestion:
    """Small models with Poisson arrivals for a minute."""
    box = parse_box(devices)
    targets = targets or Targets()
    models = box_models(box, num_models, targets, SMALL_SHAPES)
    asked = PlanQuestion(
        box,
        poisson_load(dict.fromkeys(models, rps), 60.0),
        models,
        0.99,
        models_on=lambda other: box_models(other, num_models, targets, SMALL_SHAPES),
    )
    return replace(asked, **changes)  # type: ignore[arg-type]


def arrivals(*times_s: float, model: str = "a") -> tuple[SimRequest, ...]:
    return tuple(SimRequest(f"r{i}", model, at_s, 10, 20) for i, at_s in enumerate(times_s))
