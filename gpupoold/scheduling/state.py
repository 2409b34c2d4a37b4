"""The state of the scheduling core: models, devices, live requests and their phases.

Data and lookups only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, auto

from gpupoold.domain import Priority, Role, Targets
from gpupoold.scheduling.events import DeviceUp, ModelCosts, Turn
from gpupoold.scheduling.observed import (
    DEFAULT_OUTPUT_TOKENS,
    Arrivals,
    CachedPrompts,
    OutputLengthPredictor,
)
from gpupoold.scheduling.rules import Rule

# Added per request, whose last block is not full.
_KV_BLOCK_TOKENS = 16

# In queues a request counts as arrived, and as due, this many TTFT targets earlier. With the bound,
# requests of low priority wait only for requests that arrive soon after.
HEAD_START = {
    Priority.HIGH: 1.0,
    Priority.NORMAL: 0.0,
    Priority.LOW: -1.0,
    Priority.BACKGROUND: -2.0,
}


@dataclass(slots=True, eq=False)
class Speed:
    """A model's speed on devices of one kind; ``step_ratio``: measured over predicted step."""

    costs: ModelCosts
    step_ratio: float = 1.0

    def step_s(self, batch_size: int, context_tokens: int) -> float:
        """Return the seconds of a decode step, predicted and corrected by observation; positive."""
        return max(self.costs.step_s(batch_size, context_tokens) * self.step_ratio, 1e-6)


@dataclass(frozen=True, slots=True)
class PlannedHome:
    """The device planned for a model, and the devices that may help while the home is full.

    Without ``helpers`` the home is for the engine: requests go to any device.
    """

    device: int
    helpers: frozenset[int] | None = None


@dataclass(slots=True, eq=False)
class Model:
    """A model and its speed per kind of device; ``costs`` hold for kinds without their own.

    A model that does not generate has no decode steps. ``revision`` increases with each change of
    targets, costs or a ratio. ``hosts`` have its engine, ``hostable`` devices load the
    engine or could load the engine.
    """

    name: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    costs: ModelCosts
    generates: bool = True
    revision: int = 0
    home: PlannedHome | None = None
    hosts: set[int] = field(default_factory=set)
    hostable: frozenset[int] = frozenset()
    speeds: dict[str, Speed] = field(default_factory=dict)

    def speed(self, kind: str = "") -> Speed:
        """Return the speed on devices of a kind, always the same mutable object."""
        speed = self.speeds.get(kind)
        if speed is None:
            speed = self.speeds[kind] = Speed(self.costs)
        return speed

    def set_costs(self, kind: str, costs: ModelCosts) -> None:
        """Set the costs on a kind of device; earlier corrections are dropped."""
        speed = self.speed(kind)
        if speed.costs != costs:
            speed.costs, speed.step_ratio = costs, 1.0
            self.revision += 1

    def kv_need_bytes(
        self, num_requests: int, prompt_tokens: int, context_tokens: int, answer_tokens: int
    ) -> float:
        """Return the bytes of KV to reserve for requests with ``context_tokens`` in total.

        Each request needs memory for its expected answer, and at least for half of it beyond its
        present length, because an answer beyond its expected length keeps growing.
        """
        tokens = max(prompt_tokens + answer_tokens, context_tokens + answer_tokens / 2)
        return (tokens + num_requests * _KV_BLOCK_TOKENS) * self.kv_bytes_per_token


class IllegalTransition(AssertionError):
    """A transition that a table of phases lacks: a bug."""


class RequestPhase(Enum):
    """The phase of a live request."""

    HELD = auto()  # no device yet
    QUEUED = auto()  # has a device, not sent yet
    SENT = auto()  # sent to its device, no token yet
    DECODING = auto()  # has a token
    MOVING = auto()  # has a token; being migrated to its device


class Trigger(Enum):
    """A cause of a transition."""

    PLACE = auto()
    SEND = auto()
    TOKEN = auto()
    MIGRATE = auto()
    ATTACH = auto()
    LOSE_DEVICE = auto()


# The life of a request; a transition missing here is a bug of the shell or of a policy.
TRANSITIONS: dict[tuple[RequestPhase, Trigger], RequestPhase] = {
    (RequestPhase.HELD, Trigger.PLACE): RequestPhase.QUEUED,
    (RequestPhase.QUEUED, Trigger.PLACE): RequestPhase.QUEUED,  # reassigned before being sent
    (RequestPhase.QUEUED, Trigger.SEND): RequestPhase.SENT,
    (RequestPhase.SENT, Trigger.TOKEN): RequestPhase.DECODING,
    (RequestPhase.DECODING, Trigger.TOKEN): RequestPhase.DECODING,
    (RequestPhase.DECODING, Trigger.MIGRATE): RequestPhase.MOVING,
    (RequestPhase.MOVING, Trigger.ATTACH): RequestPhase.DECODING,
    (RequestPhase.QUEUED, Trigger.LOSE_DEVICE): RequestPhase.HELD,
    (RequestPhase.SENT, Trigger.LOSE_DEVICE): RequestPhase.HELD,
    (RequestPhase.DECODING, Trigger.LOSE_DEVICE): RequestPhase.HELD,
    (RequestPhase.MOVING, Trigger.LOSE_DEVICE): RequestPhase.HELD,
}


def phase_after(phase: RequestPhase, trigger: Trigger, request: str) -> RequestPhase:
    """Return the phase after a transition; ``request`` names the request in an error."""
    after = TRANSITIONS.get((phase, trigger))
    if after is None:
        raise IllegalTransition(f"{request} is {phase.name}: no {trigger.name} from there")
    return after


@dataclass(slots=True, eq=False)
class Request:
    """A live request. ``device`` is None while held.

    ``expected_tokens`` is the expected length of its answer at arrival, at most ``max_tokens``;
    ``rule`` chose its device.
    """

    id: str
    model: Model
    arrival_s: float
    prompt_tokens: int
    output_tokens: int | None
    phase: RequestPhase = RequestPhase.HELD
    device: int | None = None
    num_tokens: int = 0
    expected_tokens: int = round(DEFAULT_OUTPUT_TOKENS)
    priority: Priority = Priority.NORMAL
    rule: Rule | None = None
    max_tokens: int | None = None
    ttft_s: float | None = None  # of the request itself; None means the model's
    cached_tokens: int = 0  # of the prompt, expected not to be computed: their KV exists

    @property
    def counted_arrival_s(self) -> float:
        """The arrival at which the model's TTFT target gives the same deadline."""
        if self.ttft_s is None:
            return self.arrival_s
        return self.arrival_s + self.ttft_s - self.model.targets.ttft_s

    def goes_before(self, other: Request) -> bool:
        """Return whether the request precedes another of its model in a queue; false for equal
        priority.
        """
        if self.priority is other.priority:
            return False
        lead = HEAD_START[self.priority] - HEAD_START[other.priority]
        return self.counted_arrival_s - lead * self.model.targets.ttft_s < other.counted_arrival_s

    @property
    def next_deadline_s(self) -> float:
        """Deadline of the next token."""
        targets = self.model.targets
        return self.counted_arrival_s + targets.ttft_s + self.num_tokens * targets.tbt_s

    @property
    def is_background(self) -> bool:
        """True if the request runs in time that others leave."""
        return self.priority is Priority.BACKGROUND

    @property
    def context_tokens(self) -> int:
        """Tokens of its KV after its first token."""
        return self.prompt_tokens + self.num_tokens

    @property
    def prefill_tokens(self) -> int:
        """Tokens that are expected to be computed before the next token."""
        return max(self.context_tokens - self.cached_tokens, 1)

    @property
    def kv_need_bytes(self) -> float:
        """Bytes of KV to reserve."""
        return self.model.kv_need_bytes(
            1, self.prompt_tokens, self.context_tokens, self.expected_tokens
        )


@dataclass(slots=True, eq=False)
class Batch:
    """Requests of one model on a device or queued for the device.

    ``kind`` is the device's kind, ``speed`` the model's speed on such devices. ``num_waiting`` need
    prefill of ``waiting_tokens`` in total with ``waiting_tokens2`` as sum of squares, beside
    ``cached_tokens`` of their prompts; the others
    have ``context_tokens`` of KV. ``prompt_tokens`` and ``expected_tokens`` cover all requests. The
    methods keep the sums, so that costs are known without visiting the requests.
    ``num_background`` requests run in time that others leave, and are no load.
    """

    model: Model
    requests: dict[str, Request] = field(default_factory=dict)
    speed: Speed = field(init=False)
    prompt_tokens: int = 0
    expected_tokens: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    waiting_tokens2: int = 0
    cached_tokens: int = 0
    context_tokens: int = 0
    num_background: int = 0
    _load: float = 0.0
    _load_revision: int = -1  # model revision of ``_load``; -1: unknown
    _deadlines_s: list[float] = field(default_factory=list)
    _deadlines_of: Targets | None = None  # targets of ``_deadlines_s``; None: unknown
    kind: InitVar[str] = ""

    def __post_init__(self, kind: str) -> None:
        self.speed = self.model.speed(kind)

    def add(self, request: Request) -> None:
        """Add a request, which waits for prefill unless it is decoding."""
        self.requests[request.id] = request
        self.prompt_tokens += request.prompt_tokens
        self.expected_tokens += request.expected_tokens
        self.num_background += request.is_background
        if request.phase is RequestPhase.DECODING:
            self.grow(request.context_tokens)
        else:
            self._count_waiting(1, request)

    def insert(self, request: Request) -> None:
        """Add a request before requests of lower priority at the end of the queue."""
        passed = list(itertools.takewhile(request.goes_before, reversed(self.requests.values())))
        self.add(request)
        for request in reversed(passed):
            self.requests[request.id] = self.requests.pop(request.id)
        self._deadlines_of = None

    def remove(self, request: Request) -> None:
        """Remove a request, whose phase must be as at the last update."""
        del self.requests[request.id]
        self.prompt_tokens -= request.prompt_tokens
        self.expected_tokens -= request.expected_tokens
        self.num_background -= request.is_background
        if request.phase is RequestPhase.DECODING:
            self.grow(-request.context_tokens)
        else:
            self._count_waiting(-1, request)

    def prefilled(self, request: Request) -> None:
        """Count a request as prefilled; to be called before its first token is counted."""
        self._count_waiting(-1, request)
        self.grow(request.context_tokens)

    def grow(self, num_tokens: int) -> None:
        """Count more tokens of decoding requests, or a request that left with its tokens."""
        self.context_tokens += num_tokens
        self._load_revision = -1
        self._deadlines_of = None

    def _count_waiting(self, sign: int, request: Request) -> None:
        num_tokens = request.prefill_tokens
        self.num_waiting += sign
        self.cached_tokens += sign * (request.context_tokens - num_tokens)
        self.waiting_tokens += sign * num_tokens
        self.waiting_tokens2 += sign * num_tokens * num_tokens
        self._load_revision = -1
        self._deadlines_of = None

    def load(self) -> float:
        """Return the share of a device's time that keeps the batch on target, prompts included."""
        model = self.model
        if self._load_revision != model.revision:
            targets = model.targets
            self._load = self.step_s() / targets.tbt_s + self.prefill_s() / targets.ttft_s
            if self.num_background:
                self._load *= 1 - self.num_background / len(self.requests)
            self._load_revision = model.revision
        return self._load

    @property
    def is_background(self) -> bool:
        """True if all requests run in time that others leave."""
        return self.num_background == len(self.requests) > 0

    def step_s(self) -> float:
        """Return the seconds of a decode step with all requests."""
        return self.speed.step_s(len(self.requests), self.context_tokens)

    def prefill_s(self, speed: Speed | None = None) -> float:
        """Return the seconds to prefill the waiting prompts; ``speed`` for another kind of
        device.
        """
        if not self.num_waiting:
            return 0.0
        costs = (speed or self.speed).costs
        return costs.prefills_s(self.num_waiting, self.waiting_tokens, self.waiting_tokens2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of KV of its requests."""
        return self.context_tokens * self.model.kv_bytes_per_token

    @property
    def kv_need_bytes(self) -> float:
        """Bytes of KV to reserve for its requests, prefilled or not."""
        context_tokens = self.waiting_tokens + self.cached_tokens + self.context_tokens
        return self.model.kv_need_bytes(
            len(self.requests), self.prompt_tokens, context_tokens, self.expected_tokens
        )

    @property
    def deadlines_s(self) -> Sequence[float]:
        """The next deadline of each request, in the order of the requests."""
        targets = self.model.targets
        if self._deadlines_of is not targets:
            ttft_s, tbt_s = targets.ttft_s, targets.tbt_s
            self._deadlines_s = [
                request.counted_arrival_s + ttft_s + request.num_tokens * tbt_s
                for request in self.requests.values()
            ]
            self._deadlines_of = targets
        return self._deadlines_s

    def next_deadline_s(self) -> float:
        """Return the earliest deadline of its requests, infinity without any."""
        return min(self.deadlines_s, default=math.inf)


@dataclass(slots=True, eq=False)
class DeviceState:
    """A device that is up: its orders and its requests.

    ``batches`` has one entry per hosted model; ``working`` and ``queued`` have only batches with
    requests, in the order of their first request. A queued request may be sent at any time;
    ``waiting_for_kv`` has requests without memory (:mod:`.admission`). Memory accumulates for
    the request ``first_for_kv``, if set. ``turn_rule`` chose the turn. Bandwidth and role may have
    changed since ``up``. The weights of models that are ``far`` are in memory of another NUMA node.
    """

    up: DeviceUp
    turn: Turn | None = None
    turn_began_s: float = 0.0
    turn_rule: Rule | None = None
    then: str | None = None
    batches: dict[str, Batch] = field(default_factory=dict)
    working: dict[str, Batch] = field(default_factory=dict)
    queued: dict[str, Batch] = field(default_factory=dict)
    moving: dict[str, Request] = field(default_factory=dict)
    missing_bytes: dict[str, int] = field(default_factory=dict)
    waiting_for_kv: dict[str, Batch] = field(default_factory=dict)
    first_for_kv: str | None = None
    is_draining: bool = False
    far: frozenset[str] = frozenset()
    number: int = field(init=False)
    bandwidth_bytes_per_s: float = field(init=False)
    role: Role = field(init=False)
    is_role_fixed: bool = field(init=False)

    def __post_init__(self) -> None:
        up = self.up
        self.number, self.bandwidth_bytes_per_s = up.device, up.bandwidth_bytes_per_s
        self.role, self.is_role_fixed = up.role, up.is_role_fixed

    @property
    def num_requests(self) -> int:
        """Number of live requests: on the device, on the way, queued, waiting for KV memory."""
        batches = (*self.working.values(), *self.queued.values())
        num_here = sum(len(batch.requests) for batch in batches)
        return num_here + len(self.moving) + self.num_waiting_for_kv

    @property
    def models_with_requests(self) -> set[str]:
        """Names of the models of these requests."""
        moving = (request.model.name for request in self.moving.values())
        return {*self.working, *self.queued, *self.waiting_for_kv, *moving}

    @property
    def migrates_out(self) -> bool:
        """True if answers should continue elsewhere: the device drains or only prefills."""
        return self.is_draining or self.role is Role.PREFILL

    @property
    def num_waiting_for_kv(self) -> int:
        """Number of requests held back for lack of KV memory."""
        return sum(len(batch.requests) for batch in self.waiting_for_kv.values())

    def queued_requests(self) -> list[Request]:
        """Return queued requests that may be sent, by model."""
        return [request for batch in self.queued.values() for request in batch.requests.values()]

    def join(self, request: Request) -> None:
        """Put a request into the batch of its model."""
        batch = self.batches[request.model.name]
        batch.add(request)
        self.working[request.model.name] = batch

    def leave(self, request: Request) -> None:
        """Remove a request from the batch of its model."""
        batch = self.working[request.model.name]
        batch.remove(request)
        if not batch.requests:
            del self.working[request.model.name]

    def enqueue(self, request: Request, *, must_wait: bool = False) -> None:
        """Queue a request for the device, to be sent later or to wait for KV memory."""
        queues = self.waiting_for_kv if must_wait else self.queued
        batch = queues.get(request.model.name)
        if batch is None:
            batch = queues[request.model.name] = Batch(request.model, kind=self.up.kind)
        batch.insert(request)

    def dequeue(self, request: Request) -> None:
        """Remove a request from its queue."""
        queues = self.waiting_for_kv if self.is_waiting_for_kv(request) else self.queued
        batch = queues[request.model.name]
        batch.remove(request)
        if not batch.requests:
            del queues[request.model.name]

    def is_waiting_for_kv(self, request: Request) -> bool:
        """Return whether the request is queued here, but must wait for KV memory."""
        line = self.waiting_for_kv.get(request.model.name)
        return line is not None and request.id in line.requests

    def speed(self, model: Model) -> Speed:
        """Return the speed of a model on the device."""
        return model.speed(self.up.kind)

    def switch_s(self, model: Model) -> float:
        """Return the seconds to bring in the missing bytes of a model."""
        return self.missing(model) / self.weights_bytes_per_s(model)

    def weights_bytes_per_s(self, model: Model) -> float:
        """Return the bandwidth of copies of a model's weights to the device."""
        share = self.up.far_share if model.name in self.far else 1.0
        return share * self.bandwidth_bytes_per_s

    def missing(self, model: Model) -> int:
        """Return the bytes to move before the model can run here."""
        return self.missing_bytes.get(model.name, model.weight_bytes)

    def kv_bytes(self, model: Model) -> int:
        """Return the bytes of the model's KV here."""
        batch = self.batches.get(model.name)
        return batch.context_tokens * model.kv_bytes_per_token if batch is not None else 0

    def total_bytes(self, model: Model) -> int:
        """Return the bytes of the model's weights and of its KV here."""
        return model.weight_bytes + self.kv_bytes(model)


@dataclass(slots=True, eq=False)
class State:
    """The whole state. Policies read the state; only the core changes the state.

    ``lengths`` predicts answer lengths from finished answers, ``cached`` cached tokens of prompts;
    ``arrivals`` has the demand.
    """

    models: dict[str, Model] = field(default_factory=dict)
    devices: dict[int, DeviceState] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    held: dict[str, Request] = field(default_factory=dict)
    num_turns: int = 0
    lengths: OutputLengthPredictor = field(default_factory=OutputLengthPredictor)
    cached: CachedPrompts = field(default_factory=CachedPrompts)
    arrivals: Arrivals = field(default_factory=Arrivals)

    @property
    def is_split(self) -> bool:
        """True if some devices only prefill or only decode."""
        return any(device.role is not Role.MIXED for device in self.devices.values())

    def num_waiting_for_kv(self, number: int) -> int:
        """Return the number of requests held back for lack of KV memory on a device."""
        device = self.devices.get(number)
        return 0 if device is None else device.num_waiting_for_kv

    def hosts(self, model: Model) -> list[DeviceState]:
        """Return the devices that can run a model, by number."""
        return [self.devices[number] for number in sorted(model.hosts)]

    def prefill_hosts(self, model: Model) -> list[DeviceState]:
        """Return the hosts of a model that take prompts, by number.

        If all hosts drain, or if no host has the role, the other hosts are returned, because a wait
        would be worse.
        """
        hosts = self._open_hosts(model)
        return [host for host in hosts if host.role is not Role.DECODE] or hosts

    def decode_hosts(self, model: Model) -> list[DeviceState]:
        """Return the hosts of a model that take answers, by number; as :meth:`prefill_hosts`."""
        hosts = self._open_hosts(model)
        return [host for host in hosts if host.role is not Role.PREFILL] or hosts

    def _open_hosts(self, model: Model) -> list[DeviceState]:
        hosts = self.hosts(model)
        return [host for host in hosts if not host.is_draining] or hosts
