"""Models with names, dimensions, targets and rates of their own, as on a small box in use."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.scenario import Draw, DrawnModel, DrawnWorkload, WithoutFile
from gpupoold.sim.workloads import poisson_workload


@dataclass(frozen=True, slots=True)
class NamedModel:
    """A model of a box; ``shape`` is a name of packaged dimensions."""

    name: str
    shape: str
    targets: Targets
    rps: float


SMALL_BOX = (
    NamedModel("qwen-7b", "Qwen2.5-7B", Targets(2.0, 0.05), 0.35),
    NamedModel("coder-7b", "Qwen2.5-7B", Targets(1.0, 0.05), 0.12),
    NamedModel("llama-8b", "Qwen2.5-7B", Targets(4.0, 0.1), 0.2),
    NamedModel("yi-9b", "Yi-1.5-9B", Targets(4.0, 0.1), 0.15),
    NamedModel("translate", "Yi-1.5-9B", Targets(10.0, 0.2), 0.12),
    NamedModel("support-bot", "Qwen2.5-7B", Targets(2.0, 0.1), 0.25),
    NamedModel("summaries", "Yi-1.5-9B", Targets(30.0, 0.5), 0.1),
)
"""Seven models for four GPUs of 24 GB, no two of which fit on one together."""


@dataclass(frozen=True, slots=True)
class NamedArrivals(WithoutFile):
    """Poisson arrivals, each model at its own rate, with ShareGPT lengths."""

    models: tuple[NamedModel, ...]

    def draw(self, draw: Draw) -> DrawnWorkload:
        """Scale all rates if a mean rate is given.

        Raises:
            UsageError: a number of models is given, or no duration.
        """
        if draw.num_models is not None:
            raise UsageError("this preset's models are fixed: no --models")
        if draw.duration_s is None:
            raise UsageError("Poisson arrivals need a duration")
        mean_rps = sum(one.rps for one in self.models) / len(self.models)
        factor = 1.0 if draw.rps is None else draw.rps / mean_rps
        rates = {one.name: one.rps * factor for one in self.models}
        requests = poisson_workload(rates, draw.duration_s, sharegpt_lengths(), draw.seed)
        own = {one.name: DrawnModel(one.shape, one.targets) for one in self.models}
        return DrawnWorkload(requests, tuple(rates), draw.duration_s, own)
