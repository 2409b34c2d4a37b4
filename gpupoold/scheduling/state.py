"""All that the scheduling core knows: models, devices, live requests. Data and lookups only."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto

from gpupoold.domain import Targets
from gpupoold.scheduling.actions import Turn
from gpupoold.scheduling.costs import ModelCosts


class Phase(Enum):
    """Where a live request stands."""

    HELD = auto()  # no device yet
    QUEUED = auto()  # has a device, which has not been told
    SENT = auto()  # its device has it; no token yet
    DECODING = auto()  # has a token
    MOVING = auto()  # has a token; its KV is on the way to its device


class Trigger(Enum):
    """What moves a request from one phase to another."""

    PLACE = auto()
    SEND = auto()
    TOKEN = auto()
    HAND_OVER = auto()
    ADOPT = auto()
    LOSE_DEVICE = auto()


# The life of a request; what is not in the table is a fault of the shell or of a policy.
TRANSITIONS: dict[tuple[Phase, Trigger], Phase] = {
    (Phase.HELD, Trigger.PLACE): Phase.QUEUED,
    (Phase.QUEUED, Trigger.PLACE): Phase.QUEUED,  # changed its mind before it was sent
    (Phase.QUEUED, Trigger.SEND): Phase.SENT,
    (Phase.SENT, Trigger.TOKEN): Phase.DECODING,
    (Phase.DECODING, Trigger.TOKEN): Phase.DECODING,
    (Phase.DECODING, Trigger.HAND_OVER): Phase.MOVING,
    (Phase.MOVING, Trigger.ADOPT): Phase.DECODING,
    (Phase.QUEUED, Trigger.LOSE_DEVICE): Phase.HELD,
    (Phase.SENT, Trigger.LOSE_DEVICE): Phase.HELD,
    (Phase.DECODING, Trigger.LOSE_DEVICE): Phase.HELD,
    (Phase.MOVING, Trigger.LOSE_DEVICE): Phase.HELD,
}


@dataclass(slots=True, eq=False)
class Model:
    """A model and what is known of its speed. ``step_ratio``: measured over predicted step."""

    name: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    costs: ModelCosts
    step_ratio: float = 1.0
    hosts: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class Request:
    """A live request. ``device`` is None while it is held."""

    id: str
    model: Model
    arrival_s: float
    prompt_tokens: int
    output_tokens: int | None
    phase: Phase = Phase.HELD
    device: int | None = None
    num_tokens: int = 0

    @property
    def next_deadline_s(self) -> float:
        """When its next token is due."""
        targets = self.model.targets
        return self.arrival_s + targets.ttft_s + self.num_tokens * targets.tbt_s

    @property
    def context_tokens(self) -> int:
        """Tokens of its KV, once it has a token."""
        return self.prompt_tokens + self.num_tokens


@dataclass(slots=True, eq=False)
class Batch:
    """The requests of one model that one device has; ``num_waiting`` have no token yet."""

    model: Model
    requests: dict[str, Request] = field(default_factory=dict)
    num_waiting: int = 0
    context_tokens: int = 0  # of those that have a token

    def step_s(self) -> float:
        """Seconds of a decode step with all its requests."""
        model = self.model
        return max(
            model.costs.step_s(len(self.requests), self.context_tokens) * model.step_ratio, 1e-6
        )

    def next_deadline_s(self) -> float:
        """The earliest deadline of its requests; infinity without any."""
        return min((one.next_deadline_s for one in self.requests.values()), default=math.inf)

    def prefill_s(self) -> float:
        """Seconds to prefill what waits."""
        if not self.num_waiting:
            return 0.0
        costs = self.model.costs
        return sum(
            costs.prefill_s(one.prompt_tokens)
            for one in self.requests.values()
            if one.phase is Phase.SENT
        )


@dataclass(slots=True, eq=False)
class Device:
    """A device that is up: what it was told to do, and what it has."""

    number: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    prefetches: bool = True
    turn: Turn | None = None
    turn_began_s: float = 0.0
    then: str | None = None
    batches: dict[str, Batch] = field(default_factory=dict)
    working: dict[str, Batch] = field(default_factory=dict)  # those that have requests
    queued: dict[str, Request] = field(default_factory=dict)
    moving: dict[str, Request] = field(default_factory=dict)
    missing_bytes: dict[str, int] = field(default_factory=dict)

    def switch_s(self, model: Model) -> float:
        """Seconds to bring in what is missing of a model."""
        return self.missing(model) / self.bandwidth_bytes_per_s

    def full_switch_s(self, model: Model) -> float:
        """Seconds to bring in a model of which nothing is there, with the KV it has here."""
        return self.total_bytes(model) / self.bandwidth_bytes_per_s

    def missing(self, model: Model) -> int:
        """Bytes to move before the model can run here."""
        return self.missing_bytes.get(model.name, model.weight_bytes)

    def total_bytes(self, model: Model) -> int:
        """Bytes of the model's weights and of the KV it has here."""
        batch = self.batches.get(model.name)
        context = batch.context_tokens if batch else 0
        return model.weight_bytes + context * model.kv_bytes_per_token


@dataclass(slots=True, eq=False)
class State:
    """The whole state. Policies read it; only the core changes it."""

    models: dict[str, Model] = field(default_factory=dict)
    devices: dict[int, Device] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    held: dict[str, Request] = field(default_factory=dict)
    num_turns: int = 0

    def hosts(self, model: Model) -> list[Device]:
        """The devices that can run a model, by number."""
        return [self.devices[number] for number in sorted(model.hosts)]
