"""All that the scheduling core knows: models, devices, live requests. Data and lookups only."""

from __future__ import annotations

import itertools
import math
from dataclasses import InitVar, dataclass, field

from gpupoold.domain import Priority, Role, Targets
from gpupoold.scheduling.actions import Turn
from gpupoold.scheduling.costs import ModelCosts
from gpupoold.scheduling.output_length import DEFAULT_OUTPUT_TOKENS, OutputLengthPredictor
from gpupoold.scheduling.phases import RequestPhase
from gpupoold.scheduling.rules import Rule

# The last block of a request is not full.
_KV_BLOCK_TOKENS = 16

# So many TTFT targets earlier a request counts as if it had come. Bounded, so that those of
# low priority wait for those that come soon after them, and not for all that ever come.
_HEAD_START = {Priority.HIGH: 1.0, Priority.NORMAL: 0.0, Priority.LOW: -1.0}


@dataclass(slots=True, eq=False)
class Speed:
    """How fast devices of one kind run a model; ``step_ratio``: measured over predicted step."""

    costs: ModelCosts
    step_ratio: float = 1.0

    def step_s(self, batch_size: int, context_tokens: int) -> float:
        """Seconds of a decode step, as predicted and corrected by what was seen; above zero."""
        return max(self.costs.step_s(batch_size, context_tokens) * self.step_ratio, 1e-6)


@dataclass(slots=True, eq=False)
class Model:
    """A model and how fast each kind of device runs it; ``costs`` of kinds that say nothing else.

    ``revision`` goes up whenever its targets, costs or a ratio change.
    """

    name: str
    targets: Targets
    weight_bytes: int
    kv_bytes_per_token: int
    costs: ModelCosts
    revision: int = 0
    hosts: set[int] = field(default_factory=set)
    speeds: dict[str, Speed] = field(default_factory=dict)

    def speed(self, kind: str = "") -> Speed:
        """Its speed on devices of a kind; always the same object, which changes."""
        speed = self.speeds.get(kind)
        if speed is None:
            speed = self.speeds[kind] = Speed(self.costs)
        return speed

    def set_costs(self, kind: str, costs: ModelCosts) -> None:
        """What a step and a prefill take on a kind of device; corrections of others are void."""
        speed = self.speed(kind)
        if speed.costs != costs:
            speed.costs, speed.step_ratio = costs, 1.0
            self.revision += 1

    def kv_need_bytes(
        self, num_requests: int, prompt_tokens: int, context_tokens: int, answer_tokens: int
    ) -> float:
        """Bytes of KV to keep for requests that have so many tokens of context in all.

        For each as much as the answer that was expected takes; and never less than half of it
        beside what they have, since those that have outgrown it go on growing.
        """
        tokens = max(prompt_tokens + answer_tokens, context_tokens + answer_tokens / 2)
        return (tokens + num_requests * _KV_BLOCK_TOKENS) * self.kv_bytes_per_token


@dataclass(slots=True, eq=False)
class Request:
    """A live request. ``device`` is None while it is held; ``expected_tokens`` is how long its
    answer was taken to be when it came, never more than ``max_tokens``; ``rule`` has given it
    its device.
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

    def goes_before(self, other: Request) -> bool:
        """Return whether it passes another of its model that is in the same queue; never one of the
        same priority."""
        if self.priority is other.priority:
            return False
        lead = _HEAD_START[self.priority] - _HEAD_START[other.priority]
        return self.arrival_s - lead * self.model.targets.ttft_s < other.arrival_s

    @property
    def next_deadline_s(self) -> float:
        """When its next token is due."""
        targets = self.model.targets
        return self.arrival_s + targets.ttft_s + self.num_tokens * targets.tbt_s

    @property
    def context_tokens(self) -> int:
        """Tokens of its KV, once it has a token."""
        return self.prompt_tokens + self.num_tokens

    @property
    def kv_need_bytes(self) -> float:
        """Bytes of KV to keep for it."""
        return self.model.kv_need_bytes(
            1, self.prompt_tokens, self.context_tokens, self.expected_tokens
        )


@dataclass(slots=True, eq=False)
class Batch:
    """Requests of one model that one device has, or that are queued for it.

    ``kind`` is the device's, ``speed`` that of the model on such devices.
    ``num_waiting`` have to be prefilled, ``waiting_tokens`` in all, the squares of which add
    up to ``waiting_tokens2``; the others have ``context_tokens`` of KV. ``prompt_tokens`` are
    those of all, ``expected_tokens`` those of their answers when they came. The sums are kept
    by the methods, so that what a batch costs is known without looking at its requests.
    """

    model: Model
    requests: dict[str, Request] = field(default_factory=dict)
    speed: Speed = field(init=False)
    prompt_tokens: int = 0
    expected_tokens: int = 0
    num_waiting: int = 0
    waiting_tokens: int = 0
    waiting_tokens2: int = 0
    context_tokens: int = 0
    _load: float = 0.0
    _load_revision: int = -1  # of the model, when the load was worked out; -1: it is not known
    kind: InitVar[str] = ""

    def __post_init__(self, kind: str) -> None:
        """Look the speed up, once."""
        self.speed = self.model.speed(kind)

    def add(self, request: Request) -> None:
        """Take in a request, waiting unless it is decoding."""
        self.requests[request.id] = request
        self.prompt_tokens += request.prompt_tokens
        self.expected_tokens += request.expected_tokens
        if request.phase is RequestPhase.DECODING:
            self.grow(request.context_tokens)
        else:
            self._count_waiting(1, request.context_tokens)

    def insert(self, request: Request) -> None:
        """As :meth:`add`, but in front of those at the end that it goes before."""
        passed = list(itertools.takewhile(request.goes_before, reversed(self.requests.values())))
        self.add(request)
        for one in reversed(passed):
            self.requests[one.id] = self.requests.pop(one.id)

    def remove(self, request: Request) -> None:
        """Let go of a request; its phase must be as when it was last looked at."""
        del self.requests[request.id]
        self.prompt_tokens -= request.prompt_tokens
        self.expected_tokens -= request.expected_tokens
        if request.phase is RequestPhase.DECODING:
            self.grow(-request.context_tokens)
        else:
            self._count_waiting(-1, request.context_tokens)

    def prefilled(self, request: Request) -> None:
        """A request waits no longer; call before its first token is counted."""
        self._count_waiting(-1, request.context_tokens)
        self.grow(request.context_tokens)

    def grow(self, num_tokens: int) -> None:
        """Requests that decode have more tokens, or one has left with its own."""
        self.context_tokens += num_tokens
        self._load_revision = -1

    def _count_waiting(self, sign: int, num_tokens: int) -> None:
        self.num_waiting += sign
        self.waiting_tokens += sign * num_tokens
        self.waiting_tokens2 += sign * num_tokens * num_tokens
        self._load_revision = -1

    def load(self) -> float:
        """Share of a device's time that it takes to keep the batch on target, prompts included."""
        model = self.model
        if self._load_revision != model.revision:
            targets = model.targets
            self._load = self.step_s() / targets.tbt_s + self.prefill_s() / targets.ttft_s
            self._load_revision = model.revision
        return self._load

    def step_s(self) -> float:
        """Seconds of a decode step with all its requests."""
        return self.speed.step_s(len(self.requests), self.context_tokens)

    def prefill_s(self, speed: Speed | None = None) -> float:
        """Seconds to prefill what waits; with ``speed``, on another kind of device."""
        if not self.num_waiting:
            return 0.0
        costs = (speed or self.speed).costs
        return costs.prefills_s(self.num_waiting, self.waiting_tokens, self.waiting_tokens2)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the KV that its requests have."""
        return self.context_tokens * self.model.kv_bytes_per_token

    @property
    def kv_need_bytes(self) -> float:
        """Bytes of KV to keep for its requests, prefilled or not."""
        context_tokens = self.waiting_tokens + self.context_tokens
        return self.model.kv_need_bytes(
            len(self.requests), self.prompt_tokens, context_tokens, self.expected_tokens
        )

    def next_deadline_s(self) -> float:
        """The earliest deadline of its requests; infinity without any."""
        return min((one.next_deadline_s for one in self.requests.values()), default=math.inf)


@dataclass(slots=True, eq=False)
class DeviceState:
    """A device that is up: what it was told to do, and what it has.

    Of ``batches`` there is one for each model it hosts, in ``working`` and ``queued`` those
    that have requests, in the order in which they got their first. Who is queued may be sent
    at any time; for those in ``waiting_for_kv`` there was no room (:mod:`.kv_room`). One of
    them may be ``first_for_kv``: room is gathered for it. ``turn_rule`` has chosen the turn.
    Devices of one ``kind`` are equally fast.
    """

    number: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    prefetches: bool = True
    turn: Turn | None = None
    turn_began_s: float = 0.0
    turn_rule: Rule | None = None
    then: str | None = None
    batches: dict[str, Batch] = field(default_factory=dict)
    working: dict[str, Batch] = field(default_factory=dict)
    queued: dict[str, Batch] = field(default_factory=dict)
    moving: dict[str, Request] = field(default_factory=dict)
    missing_bytes: dict[str, int] = field(default_factory=dict)
    kv_host_bytes: int | None = None
    waiting_for_kv: dict[str, Batch] = field(default_factory=dict)
    first_for_kv: str | None = None
    role: Role = Role.MIXED
    is_role_fixed: bool = False
    is_draining: bool = False
    kind: str = ""

    @property
    def num_requests(self) -> int:
        """Live requests that it has or will have: on their way, queued, waiting for KV room."""
        batches = (*self.working.values(), *self.queued.values())
        num_here = sum(len(batch.requests) for batch in batches)
        return num_here + len(self.moving) + self.num_waiting_for_kv

    @property
    def gives_away(self) -> bool:
        """True if answers should go on elsewhere: it is being emptied, or only prefills."""
        return self.is_draining or self.role is Role.PREFILL

    @property
    def num_waiting_for_kv(self) -> int:
        """Requests that are not sent because their KV would not fit."""
        return sum(len(batch.requests) for batch in self.waiting_for_kv.values())

    def queued_requests(self) -> list[Request]:
        """Those that it was not told of, but may be, by model."""
        return [one for batch in self.queued.values() for one in batch.requests.values()]

    def join(self, request: Request) -> None:
        """Put a request into the batch of its model."""
        batch = self.batches[request.model.name]
        batch.add(request)
        self.working[request.model.name] = batch

    def leave(self, request: Request) -> None:
        """Take a request out of the batch of its model."""
        batch = self.working[request.model.name]
        batch.remove(request)
        if not batch.requests:
            del self.working[request.model.name]

    def enqueue(self, request: Request, *, must_wait: bool = False) -> None:
        """Keep a request for the device, which is not told yet; or which must wait for KV room."""
        queues = self.waiting_for_kv if must_wait else self.queued
        batch = queues.get(request.model.name)
        if batch is None:
            batch = queues[request.model.name] = Batch(request.model, kind=self.kind)
        batch.insert(request)

    def dequeue(self, request: Request) -> None:
        """Take a request back out of its queue."""
        queues = self.waiting_for_kv if self.is_waiting_for_kv(request) else self.queued
        batch = queues[request.model.name]
        batch.remove(request)
        if not batch.requests:
            del queues[request.model.name]

    def is_waiting_for_kv(self, request: Request) -> bool:
        """Return whether it is queued here, but must not be sent yet."""
        line = self.waiting_for_kv.get(request.model.name)
        return line is not None and request.id in line.requests

    def speed(self, model: Model) -> Speed:
        """How fast it runs a model."""
        return model.speed(self.kind)

    def switch_s(self, model: Model) -> float:
        """Seconds to bring in what is missing of a model."""
        return self.missing(model) / self.bandwidth_bytes_per_s

    def missing(self, model: Model) -> int:
        """Bytes to move before the model can run here."""
        return self.missing_bytes.get(model.name, model.weight_bytes)

    def total_bytes(self, model: Model) -> int:
        """Bytes of the model's weights and of the KV it has here."""
        batch = self.batches.get(model.name)
        return model.weight_bytes + (batch.kv_bytes if batch else 0)


@dataclass(slots=True, eq=False)
class State:
    """The whole state. Policies read it; only the core changes it.

    ``lengths`` predicts how long answers get, by those that have ended.
    """

    models: dict[str, Model] = field(default_factory=dict)
    devices: dict[int, DeviceState] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    held: dict[str, Request] = field(default_factory=dict)
    num_turns: int = 0
    lengths: OutputLengthPredictor = field(default_factory=OutputLengthPredictor)

    @property
    def is_split(self) -> bool:
        """True if some devices only prefill or only decode."""
        return any(one.role is not Role.MIXED for one in self.devices.values())

    def hosts(self, model: Model) -> list[DeviceState]:
        """The devices that can run a model, by number."""
        return [self.devices[number] for number in sorted(model.hosts)]

    def prefill_hosts(self, model: Model) -> list[DeviceState]:
        """Those of a model's hosts that take prompts, by number.

        Where all are being emptied, any of them; where none has the role, any of the others:
        neither is a reason to let a request wait.
        """
        hosts = self._open_hosts(model)
        return [one for one in hosts if one.role is not Role.DECODE] or hosts

    def decode_hosts(self, model: Model) -> list[DeviceState]:
        """Those of a model's hosts that take answers, by number; as :meth:`prefill_hosts`."""
        hosts = self._open_hosts(model)
        return [one for one in hosts if one.role is not Role.PREFILL] or hosts

    def _open_hosts(self, model: Model) -> list[DeviceState]:
        hosts = self.hosts(model)
        return [one for one in hosts if not one.is_draining] or hosts
