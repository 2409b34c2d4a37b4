"""A model in the simulator: targets, sizes and speed."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Targets
from gpupoold.latency.models import LatencyModel
from gpupoold.scheduling.events import ModelAdded
from gpupoold.scheduling.velocity import costs_of


@dataclass(frozen=True, slots=True)
class SimModel:
    """A registered model on one kind of device."""

    name: str
    targets: Targets
    latency: LatencyModel
    weight_bytes: int
    kv_bytes_per_token: int
    generates: bool = True

    def added(self) -> ModelAdded:
        """Return the model's event for the scheduling core."""
        return ModelAdded(
            self.name,
            self.targets,
            self.weight_bytes,
            self.kv_bytes_per_token,
            costs_of(self.latency),
            self.generates,
        )
