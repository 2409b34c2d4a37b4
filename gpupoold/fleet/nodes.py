"""Nodes and models of a fleet, for the placement and the entrance. Pure data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from gpupoold.api.schemas_fleet import FleetModel, FleetReport
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.domain import ModelState, Priority
from gpupoold.scheduling.pressure import ModelDemand

# Spreads models without requests over the nodes.
LEAST_LOAD = 0.01


@dataclass(frozen=True, slots=True)
class Node:
    """A daemon of the fleet with its latest report.

    ``url`` is the daemon's address for the entrance. ``seen_s`` is the controller's time of the
    report. ``ongoing`` has the models of orders under way, ``failed`` the models of failed orders,
    ``retiring`` the models whose requests go to other nodes.
    """

    name: str
    url: str
    report: FleetReport
    seen_s: float
    is_draining: bool = False
    is_lost: bool = False
    ongoing: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()
    retiring: frozenset[str] = frozenset()

    @property
    def takes_requests(self) -> bool:
        return not self.is_lost and not self.is_draining and self.report.is_ready

    @property
    def num_devices(self) -> int:
        return len(self.report.device_bytes)

    def model(self, name: str) -> FleetModel | None:
        """Return the model of this name, if the daemon has it."""
        return next((model for model in self.report.models if model.name == name), None)

    def serves(self, name: str) -> bool:
        """Return whether the daemon answers requests of the model."""
        model = self.model(name)
        return model is not None and model.state == ModelState.READY


@dataclass(frozen=True, slots=True)
class FleetSpec:
    """A model for placement on at least ``least_replicas`` nodes."""

    request: AddModelRequest
    least_replicas: int = 1

    @property
    def name(self) -> str:
        return self.request.name


def demand_of(spec: FleetSpec, found: Collection[FleetModel]) -> ModelDemand:
    """Return the model's work on one device, summed over the reports of all nodes."""
    window_s = max((one.window_s for one in found), default=spec.request.ttft_s)
    idle_share = 1.0
    for one in found:
        idle_share *= 1.0 - one.busy_share
    return ModelDemand(
        spec.name,
        max(LEAST_LOAD, sum(one.load for one in found)),
        max(LEAST_LOAD, 1.0 - idle_share),
        window_s,
        max((one.weights_bytes for one in found), default=0),
        sum(one.kv_bytes for one in found),
    )


def shared(demand: ModelDemand, num: int) -> ModelDemand:
    """Return the work divided by ``num`` replicas or devices."""
    return replace(
        demand,
        load=demand.load / num,
        busy_share=demand.busy_share / num,
        kv_bytes=demand.kv_bytes / num,
    )


@dataclass(frozen=True, slots=True)
class FleetTable:
    """The controller's knowledge for entrances; ``version`` grows with each round."""

    version: int = 0
    secret: str = ""
    nodes: tuple[Node, ...] = field(default=())
    placed: Mapping[str, str] = field(default_factory=dict)
    """Names of the models placed by the fleet by names and aliases, also without a node so far."""
    priorities: Mapping[str, Priority] = field(default_factory=dict)
    """Priorities of the fleet's API keys by id, without keys of normal priority."""

    def names(self) -> dict[str, str]:
        """Return the models' names by names, aliases, presets and adapters."""
        return dict(self.placed) | {
            name: model.name
            for node in self.nodes
            for model in node.report.models
            for name in model.names
        }
