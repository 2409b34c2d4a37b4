"""The record of a live request, the index of all records, and messages to their frontends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from http import HTTPStatus

import msgspec

from gpupoold.domain import FinalFailure, Targets
from gpupoold.scheduling.state import State
from gpupoold.scheduling.wait_estimate import lines_of, waits_of
from gpupoold.wire import messages as m
from gpupoold.wire.messages import GrammarRefused, WrongAnswer


class MigrationPhase(Enum):
    """The phase of a migration."""

    REQUESTED = auto()  # the source has the request, and the order to release the request
    LEFT = auto()  # the target has the request, whose KV is on the way
    TARGET_LOST = auto()  # as REQUESTED, but the target is dead: the request restarts on release


class MigrationEvent(Enum):
    """A cause of a transition of a migration."""

    RELEASED = auto()
    ATTACHED = auto()
    SOURCE_LOST = auto()
    TARGET_LOST = auto()


MIGRATION_TRANSITIONS: dict[tuple[MigrationPhase, MigrationEvent], MigrationPhase | None] = {
    (MigrationPhase.REQUESTED, MigrationEvent.RELEASED): MigrationPhase.LEFT,
    (MigrationPhase.REQUESTED, MigrationEvent.SOURCE_LOST): None,
    (MigrationPhase.REQUESTED, MigrationEvent.TARGET_LOST): MigrationPhase.TARGET_LOST,
    (MigrationPhase.LEFT, MigrationEvent.ATTACHED): None,
    (MigrationPhase.LEFT, MigrationEvent.SOURCE_LOST): MigrationPhase.LEFT,
    (MigrationPhase.LEFT, MigrationEvent.TARGET_LOST): None,
    (MigrationPhase.TARGET_LOST, MigrationEvent.RELEASED): None,
    (MigrationPhase.TARGET_LOST, MigrationEvent.SOURCE_LOST): None,
}
"""The phase after an event; None ends the migration. Other events are not expected."""


@dataclass(frozen=True, slots=True)
class Migration:
    """The migration of a request from worker ``source`` to worker ``target``."""

    source: int
    target: int
    phase: MigrationPhase = MigrationPhase.REQUESTED

    def concerns(self, worker: int) -> bool:
        """Return whether the worker is the source or the target."""
        return worker in (self.source, self.target)

    def expects(self, event: MigrationEvent) -> bool:
        """Return whether the table has a transition for the event."""
        return (self.phase, event) in MIGRATION_TRANSITIONS

    def after(self, event: MigrationEvent) -> Migration | None:
        """Return the migration after an expected event, None at the end of the migration."""
        phase = MIGRATION_TRANSITIONS[self.phase, event]
        return None if phase is None else replace(self, phase=phase)

    def without(self, worker: int) -> Migration | None:
        """Return the migration after the death of a worker, None at the end of the migration."""
        lost = {self.source: MigrationEvent.SOURCE_LOST, self.target: MigrationEvent.TARGET_LOST}
        event = lost.get(worker)
        return self.after(event) if event is not None and self.expects(event) else self


@dataclass(slots=True)
class Suspect:
    """The state of a request under suspicion of a crash.

    ``num_tokens`` is the number of tokens at the latest crash. A suspect is held until a trial,
    which began at ``tried_since_s``.
    """

    num_tokens: int
    num_crashes: int = 1
    num_unclear_trials: int = 0
    tried_since_s: float | None = None
    is_held: bool = True
    is_cleared: bool = False

    @property
    def is_isolated(self) -> bool:
        """True if the request may not share a step with other requests."""
        return not self.is_cleared or self.num_crashes > 1


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request from arrival to end; the only record of the request outside the scheduling core.

    ``order`` is the message that brought the request; ``device`` is None until a worker has the
    request. ``counted_name`` is the name under which the request is counted: its preset's,
    adapter's or model's. ``key_id`` is empty without an API key.
    """

    order: m.AddRequest
    targets: Targets
    device: int | None = None
    output_token_ids: list[int] = field(default_factory=list)
    token_times_s: list[float] = field(default_factory=list)
    num_in_time: int = 0  # tokens; all deadlines are fixed at arrival
    late_s: float = 0.0  # of the latest token
    is_cold: bool = False  # waits for weights; set by LiveRequests.set_cold()
    warmed_s: float | None = None  # when the model was in host memory, if the request had to wait
    attached_s: float | None = None  # when the present device had the KV from another device
    migration: Migration | None = None
    suspect: Suspect | None = None  # None unless a candidate for the cause of a crash

    request_id: str = field(init=False)
    model: str = field(init=False)
    counted_name: str = field(init=False)
    arrival_s: float = field(init=False)
    num_prompt_tokens: int = field(init=False)
    key_id: str = field(init=False)
    frontend: int = field(init=False)

    def __post_init__(self) -> None:
        """Copy fields of the order that each token needs, because a property is slower."""
        order = self.order
        self.counted_name = order.counted_name
        self.request_id, self.model, self.frontend = order.request_id, order.model, order.frontend
        self.arrival_s, self.num_prompt_tokens = order.arrival_s, order.num_prompt_tokens
        self.key_id = order.key_id

    @property
    def is_background(self) -> bool:
        """True if the request is of a batch, and runs in time that others leave."""
        return self.order.is_background

    @property
    def is_held(self) -> bool:
        """True if the request waits for a trial as a suspect."""
        return self.suspect is not None and self.suspect.is_held

    @property
    def is_isolated(self) -> bool:
        """True if the request may not share a step with other requests."""
        return self.suspect is not None and self.suspect.is_isolated

    def order_now(self) -> m.AddRequest:
        """Return the order to start the request, or to continue after the tokens so far."""
        return msgspec.structs.replace(
            self.order, output_token_ids=list(self.output_token_ids), is_isolated=self.is_isolated
        )

    def add_tokens(
        self, token_ids: Sequence[int], at_s: float, *, has_result: bool = False
    ) -> None:
        """Add tokens sent at ``at_s``; a pooling result counts as a token without an id."""
        times_s, targets = self.token_times_s, self.targets
        self.output_token_ids += token_ids
        for _ in range(len(token_ids) + has_result):
            late_s = at_s - targets.deadline_s(self.arrival_s, len(times_s))
            self.num_in_time += late_s <= 0
            self.late_s = max(late_s, 0.0)
            times_s.append(at_s)

    @property
    def last_sign_s(self) -> float:
        """Time of the latest token, or else of the arrival."""
        return self.token_times_s[-1] if self.token_times_s else self.arrival_s

    @property
    def next_deadline_s(self) -> float:
        """Deadline of the next token."""
        return self.targets.deadline_s(self.arrival_s, len(self.token_times_s))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, None before the token."""
        return self.token_times_s[0] - self.arrival_s if self.token_times_s else None

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times_s)]


def num_bytes_of(message: m.AddRequest) -> int:
    """Return the bytes of a request in the encoding for workers."""
    return sum(map(len, message.frames))


class LiveRequests:
    """All live requests by id, counted per model."""

    def __init__(self) -> None:
        self._requests: dict[str, LiveRequest] = {}
        self._num_by_model: Counter[str] = Counter()
        self._num_by_name: Counter[str] = Counter()
        self._num_cold_by_model: Counter[str] = Counter()
        self._num_by_key: Counter[str] = Counter()
        self._bytes_by_key: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Iterate over all requests, oldest first; the index must not change meanwhile."""
        return iter(self._requests.values())

    def __getitem__(self, request_id: str) -> LiveRequest:
        return self._requests[request_id]

    def add(self, request: LiveRequest) -> None:
        """Add a request.

        Raises ValueError: another live request has the same id; nothing has changed.
        """
        if request.request_id in self._requests:
            raise ValueError(f"a live request already has the id {request.request_id}")
        self._requests[request.request_id] = request
        self._num_by_model[request.model] += 1
        self._num_by_name[request.counted_name] += 1
        self._num_by_key[request.key_id] += not request.is_background
        self._bytes_by_key[request.key_id] += num_bytes_of(request.order)

    def get(self, request_id: str) -> LiveRequest | None:
        """Return the request, None after its end."""
        return self._requests.get(request_id)

    def pop(self, request_id: str) -> LiveRequest | None:
        """Remove and return the request, None if it has ended before."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self.set_cold(request, is_cold=False)
            self._num_by_model[request.model] -= 1
            self._num_by_name[request.counted_name] -= 1
            self._num_by_key[request.key_id] -= not request.is_background
            self._bytes_by_key[request.key_id] -= num_bytes_of(request.order)
        return request

    def set_cold(self, request: LiveRequest, *, is_cold: bool) -> None:
        """Record the begin or the end of a request's wait for weights in host memory."""
        self._num_cold_by_model[request.model] += is_cold - request.is_cold
        request.is_cold = is_cold

    def num_waiting(self, model: str) -> int:
        """Return the number of requests that wait for the weights of a model."""
        return self._num_cold_by_model[model]

    def num_of(self, model: str) -> int:
        """Return the number of live requests of a model, with those of its adapters."""
        return self._num_by_model[model]

    def num_of_name(self, name: str) -> int:
        """Return the number of live requests counted under a name."""
        return self._num_by_name[name]

    def num_of_key(self, key_id: str) -> int:
        """Return the number of live requests of an API key; "" means without a key."""
        return self._num_by_key[key_id]

    @property
    def num_bytes(self) -> int:
        """Bytes of all live requests in the encoding for workers."""
        return self._bytes_by_key.total()

    def bytes_of_key(self, key_id: str) -> int:
        """Return the bytes of live requests of an API key; "" means without a key."""
        return self._bytes_by_key[key_id]

    def of_model(self, model: str) -> list[LiveRequest]:
        """Return the live requests of a model, oldest first."""
        return [request for request in self._requests.values() if request.model == model]

    def of_name(self, name: str) -> list[LiveRequest]:
        """Return the live requests counted under a name, oldest first."""
        return [request for request in self._requests.values() if request.counted_name == name]

    def of_frontend(self, number: int) -> list[LiveRequest]:
        """Return the live requests of a frontend, oldest first."""
        return [request for request in self._requests.values() if request.frontend == number]

    def on_device(self, device: int) -> list[LiveRequest]:
        """Return the live requests on a worker, oldest first."""
        return [request for request in self._requests.values() if request.device == device]

    def silent_since(self, before_s: float) -> list[LiveRequest]:
        """Return the live requests without a token or arrival since ``before_s``, oldest first."""
        return [request for request in self._requests.values() if request.last_sign_s < before_s]

    def all(self) -> list[LiveRequest]:
        """Return all live requests, oldest first."""
        return list(self._requests.values())


class Replies:
    """Sends admissions, outputs and failures, each to one frontend.

    ``send`` takes a frontend's number and a message; messages of ended requests are dropped.
    """

    def __init__(self, live: LiveRequests, send: Callable[[int, m.Message], None]) -> None:
        self._live = live
        self.send = send

    def outputs(self, message: m.StepOutputs) -> None:
        """Send each frontend its part of one step's outputs."""
        for number, part in parts_of(message, self._frontend_of).items():
            self.send(number, part)

    def failed(
        self, requests: Iterable[LiveRequest], reason: str, final: FinalFailure | None = None
    ) -> None:
        """Report that these live requests end with an error, which may be ``final``."""
        status = HTTPStatus.SERVICE_UNAVAILABLE if final is None else final.status
        ids: dict[tuple[int, str], list[str]] = {}
        for request in requests:
            ids.setdefault((request.frontend, request.model), []).append(request.request_id)
        for (number, model), request_ids in ids.items():
            failed = m.RequestsFailed(model, request_ids, reason, status, final or "")
            self.send(number, failed)

    def _frontend_of(self, request_id: str) -> int | None:
        request = self._live.get(request_id)
        return None if request is None else request.frontend


class WaitReports:
    """Answers ``AskWaits``, line by line: other work of the event loop comes between two lines."""

    def __init__(
        self,
        live: LiveRequests,
        state: State,
        send: Callable[[int, m.Message], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``send`` takes a frontend's number and a message."""
        self._live = live
        self._state = state
        self._send = send
        self._clock = clock
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def asked(self, frontend: int, message: m.AskWaits) -> None:
        """Report to a frontend, unless a report is under way."""
        task = self._tasks.get(frontend)
        if task is None or task.done():
            report = self._report(frontend, frozenset(message.request_ids))
            self._tasks[frontend] = asyncio.create_task(report, name="waits")

    async def _report(self, frontend: int, request_ids: frozenset[str]) -> None:
        found = map(self._live.get, request_ids)
        cold = [request.request_id for request in found if request is not None and request.is_cold]
        if cold:
            self._send(frontend, m.Waits([m.RequestWait(request_id, 0) for request_id in cold]))
        for line in lines_of(self._state, request_ids):
            waits = [
                m.RequestWait(request_id, *wait)
                for request_id, wait in waits_of(self._state, line, self._clock())
                if request_id in request_ids
            ]
            if waits:
                self._send(frontend, m.Waits(waits))
            await asyncio.sleep(0)


def waits_for(request: LiveRequest, state: State, *, has_hosts: bool) -> str:
    """Return the cause of a request's wait, in words; ``has_hosts``: a worker has the model."""
    if request.is_cold:
        return f"{request.model} is not in host memory yet"
    if request.is_held:
        return "the request may have crashed a worker and waits to be retried alone"
    if not has_hosts:
        return f"no device has {request.model} now"
    if request.device is None:
        return "no device has taken the request"
    device = state.devices.get(request.device)
    if device is None or device.turn is None or device.turn.model != request.model:
        return f"the request waits for the turn of {request.model} on device {request.device}"
    return f"device {request.device} is running the request but does not respond"


def parts_of(
    message: m.StepOutputs, frontend_of: Callable[[str], int | None]
) -> dict[int, m.StepOutputs]:
    """Divide one step's outputs by frontend.

    ``frontend_of`` returns a request's frontend number, None after the request's end.
    """
    progress: dict[int, list[m.RequestProgress]] = {}
    for item in message.progress:
        number = frontend_of(item.request_id)
        if number is not None:
            progress.setdefault(number, []).append(item)
    if len(progress) == 1 and len(message.frame_counts) <= 1:
        return dict.fromkeys(progress, message)
    frames, begin = dict[int, list[bytes]](), 0
    for number, count in message.frame_counts.items():
        frames[number] = message.frames[begin : begin + count]
        begin += count
    return {
        number: msgspec.structs.replace(
            message, frames=frames.get(number, []), progress=items, frame_counts={}
        )
        for number, items in progress.items()
    }


class RequestListener:
    """Takes the dispatcher's reports about a model's requests; this class ignores all reports."""

    def request_began(self, model: str) -> None:
        """Handle the arrival of a request."""

    def request_ended(self, model: str, device: int | None) -> None:
        """Handle the end of a request; ``device`` is None if no device had the request."""

    def weights_wanted(self, model: str) -> None:
        """Handle the wait of a request until the model is warm."""

    def weights_damaged(self, answer: WrongAnswer) -> None:
        """Handle a failed self-check."""

    def grammar_refused(self, refused: GrammarRefused) -> None:
        """Handle a grammar that has exceeded a bound in a worker."""

    def convicted(self, model: str, request_id: str) -> None:
        """Handle the end of a request that crashed a worker when retried alone."""

    def acquitted(self, model: str) -> None:
        """Handle a crash whose suspects are all cleared: the crash counts for the model."""
