"""The phases and records of models on the workers, and circuit breakers. Pure bookkeeping."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from statistics import median_low
from typing import Generic, TypeVar

from gpupoold.control.processes.supervised import Death
from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.durations import GraphSizes, LoadStages
from gpupoold.scheduling.state import IllegalTransition
from gpupoold.wire.messages import EngineMemory

_NUM_REMEMBERED = 5

MAX_CRASHES = 2
WINDOW_S = 600.0
MAX_CONVICTED = 3
"""Number of consecutive requests that crash a worker, each alone, before the model is at fault."""
FIRST_WAIT_S = 30.0
MAX_WAIT_S = 3600.0


class ModelPhase(Enum):
    """The phase of a model's life."""

    REMOVED = auto()  # first and last: no model has the name
    PROPOSED = auto()  # a client adds the model, whose checkpoint is found, checked or downloaded
    REGISTERED = auto()  # in the registry, not loaded since the daemon's start
    LOADING = auto()  # no device has the model, or no frontend has mounted the API
    READY = auto()  # requests can be served
    DRAINING = auto()  # takes no requests, because the model is being removed or unloaded
    FAILED = auto()  # no device could load the model; a retry follows
    QUARANTINED = auto()  # ended its workers; no device may load the model before the retry


class ModelEvent(Enum):
    """A cause of a model's transition."""

    PROPOSE = auto()  # a client asks to add the model
    REGISTER = auto()
    LOAD = auto()
    OPEN = auto()  # a device has the model, and the API is mounted
    LOSE_DEVICES = auto()  # the last device with the model has left
    FAIL = auto()
    QUARANTINE = auto()
    DRAIN = auto()
    RESUME = auto()  # the drain has ended, and the model stays
    REMOVE = auto()


_M, _E = ModelPhase, ModelEvent
_KNOWN = {*ModelPhase} - {_M.REMOVED, _M.PROPOSED}  # in the registry

# While a model drains, changes of devices and failed loads are no events: the state after the
# drain decides between FAIL, QUARANTINE and RESUME.
MODEL_TRANSITIONS: Mapping[tuple[ModelPhase, ModelEvent], ModelPhase] = {
    (_M.REMOVED, _E.PROPOSE): _M.PROPOSED,
    (_M.REMOVED, _E.REGISTER): _M.REGISTERED,  # read from the registry when the daemon starts
    (_M.PROPOSED, _E.REGISTER): _M.REGISTERED,
    **{(phase, _E.LOAD): _M.LOADING for phase in (_M.REGISTERED, _M.FAILED, _M.QUARANTINED)},
    (_M.LOADING, _E.OPEN): _M.READY,
    (_M.READY, _E.LOSE_DEVICES): _M.LOADING,
    **{(phase, _E.FAIL): _M.FAILED for phase in _KNOWN - {_M.READY}},
    **{(phase, _E.QUARANTINE): _M.QUARANTINED for phase in _KNOWN},
    **{(phase, _E.DRAIN): _M.DRAINING for phase in _KNOWN - {_M.DRAINING}},
    (_M.DRAINING, _E.RESUME): _M.LOADING,
    **{(phase, _E.REMOVE): _M.REMOVED for phase in _KNOWN | {_M.PROPOSED}},
}


class HostPhase(Enum):
    """The phase of a model on one worker."""

    ABSENT = auto()
    LOADING = auto()  # the worker has the order to load
    LOADED = auto()  # has the engine, but no weights snapshot to restore from
    ATTACHED = auto()  # has the engine and the weights snapshot
    UNLOADING = auto()  # the worker has the order to unload


class HostEvent(Enum):
    """A cause of a transition of a model on one worker."""

    LOAD = auto()
    FAIL = auto()
    LOADED = auto()
    ATTACH = auto()
    DETACH = auto()
    UNLOAD = auto()
    UNLOADED = auto()
    LOSE_WORKER = auto()


_H, _V = HostPhase, HostEvent

HOST_TRANSITIONS: Mapping[tuple[HostPhase, HostEvent], HostPhase] = {
    (_H.ABSENT, _V.LOAD): _H.LOADING,
    (_H.LOADING, _V.FAIL): _H.ABSENT,
    (_H.LOADING, _V.LOADED): _H.LOADED,
    (_H.LOADED, _V.ATTACH): _H.ATTACHED,
    (_H.ATTACHED, _V.DETACH): _H.LOADED,
    (_H.LOADING, _V.UNLOAD): _H.UNLOADING,  # cancelled before the worker has answered
    (_H.LOADED, _V.UNLOAD): _H.UNLOADING,
    (_H.ATTACHED, _V.UNLOAD): _H.UNLOADING,
    (_H.UNLOADING, _V.UNLOADED): _H.ABSENT,
    **{(phase, _V.LOSE_WORKER): _H.ABSENT for phase in HostPhase},
}

P = TypeVar("P", bound=Enum)
E = TypeVar("E", bound=Enum)


class Life(Generic[P, E]):
    """The present phase of one subject, which changes by the events of a table only."""

    def __init__(self, subject: str, phase: P, table: Mapping[tuple[P, E], P]) -> None:
        self.subject = subject
        self.phase = phase
        self._table = table
        self._last: deque[tuple[P, E]] = deque(maxlen=_NUM_REMEMBERED)

    def move(self, event: E) -> None:
        """Change the phase.

        Raises IllegalTransition: the table has no such transition. The message has the subject, the
        phase, the event and the latest transitions.
        """
        after = self._table.get((self.phase, event))
        if after is None:
            before = "".join(f"{phase.name} -{past.name}-> " for phase, past in self._last)
            raise IllegalTransition(
                f"{self.subject} is {self.phase.name}: {event.name} is no event of this phase "
                f"(so far: {before}{self.phase.name})"
            )
        self._last.append((self.phase, event))
        self.phase = after


NOTHING = EngineMemory()
_WITH_ENGINE = (HostPhase.LOADED, HostPhase.ATTACHED, HostPhase.UNLOADING)


class Host(Life[HostPhase, HostEvent]):
    """A model on one worker; ``layout_digest`` is the digest of the loaded layout.

    ``memory`` is the memory of the model's engine outside the pages, ``load`` the time of its load,
    ``graphs`` the sizes of batches with CUDA graphs, ``resident_bytes`` the weights that were on
    the device before, ``since_s`` the end of the load, ``family`` what a model that takes the
    engine over must have in common (empty if none can, because of ``why_unshared``), ``why`` the
    reason for the engine on this worker, and ``options`` are the engine's options, None while the
    engine is being replaced, or if nobody has waited for the end.
    """

    def __init__(self, model: str, number: int) -> None:
        super().__init__(f"{model} on worker {number}", HostPhase.ABSENT, HOST_TRANSITIONS)
        self.layout_digest = ""
        self.memory = NOTHING
        self.load = LoadStages()
        self.graphs = GraphSizes()
        self.resident_bytes = 0
        self.since_s = 0.0
        self.family = ""
        self.why_unshared = ""
        self.why = ""
        self.options: Mapping[str, str] | None = {}

    @property
    def is_ordered(self) -> bool:
        """True if the worker has, or will have, the model."""
        return self.phase not in (HostPhase.ABSENT, HostPhase.UNLOADING)

    @property
    def has_snapshot(self) -> bool:
        """True if the model can be restored from an attached snapshot."""
        return self.phase is HostPhase.ATTACHED

    def loaded(
        self, layout_digest: str, memory: EngineMemory = NOTHING, *, has_snapshot: bool
    ) -> None:
        """Record the end of a load; the engine may have replaced an earlier engine."""
        if self.phase is HostPhase.LOADING:
            self.move(HostEvent.LOADED)
        if self.phase is HostPhase.LOADED and has_snapshot:
            self.move(HostEvent.ATTACH)
        self.layout_digest, self.memory = layout_digest, memory


Engines = dict[str, dict[int, Host]]
"""The hosts with an engine, by model and worker."""


class Hosts:
    """The hosts by worker number and model; created on first use."""

    def __init__(self) -> None:
        self._hosts: defaultdict[int, dict[str, Host]] = defaultdict(dict)
        self._firsts: dict[int, str] = {}
        self._kept_bytes: dict[int, int] = {}
        self._kept_engines: dict[int, str] = {}
        self.families: dict[str, str] = {}  # of the models' latest loads, empty for none

    def of(self, model: str, number: int) -> Host:
        """Return the model's host on a worker, which lasts until the worker ends."""
        host = self._hosts[number].get(model)
        if host is None:
            host = self._hosts[number][model] = Host(model, number)
        return host

    def family_of(self, model: str) -> str:
        """Return the family of a model as of its latest load, empty if none or unknown."""
        return self.families.get(model, "")

    def loaded(self, model: str, number: int, engine_of: str = "", family: str = "") -> None:
        """Record a load, the first on a worker perhaps, or one into the engine of another model."""
        self.of(model, number).family = self.families[model] = family
        kept = self._kept_engines.pop(number, "")
        if kept and kept == engine_of:
            if self._firsts.get(number) == kept:
                self._firsts[number] = model
        elif kept:  # the worker has closed it
            self.freed(kept, number, 0)
        self._firsts.setdefault(number, model)

    def keep_engine(self, model: str, number: int) -> None:
        """Record that a worker keeps the engine of an unloaded model for the next load."""
        self._kept_engines[number] = model

    def kept_engine(self, number: int) -> str:
        """Return the former model of the engine that a worker keeps, empty without one."""
        return self._kept_engines.get(number, "")

    def freed(self, model: str, number: int, num_bytes: int) -> None:
        """Record the memory outside the pages that a worker gave back at the end of an engine.

        The first engine's load also takes memory of the process that all engines share, such as
        libraries and kernels, which stays. A busy worker frees an engine only later: then the
        median of the other engines counts as given back.
        """
        if self._firsts.get(number) == model:
            self._firsts[number] = ""
            freed_bytes = max(num_bytes, self.usual_bytes(number, besides=model) or 0)
            taken_bytes = self.of(model, number).memory.device_bytes
            self._kept_bytes[number] = max(0, taken_bytes - freed_bytes)

    def usual_bytes(self, number: int, besides: str = "") -> int | None:
        """Return the median memory of a worker's engines without one model's, None without any."""
        engines = self.engines_on(number)
        others = [host.memory.device_bytes for name, host in engines.items() if name != besides]
        return median_low(others) if others else None

    def first_on(self, number: int) -> str:
        """Return the model that a worker loaded first, empty if none or unloaded meanwhile."""
        return self._firsts.get(number, "")

    def kept_bytes(self, number: int) -> int:
        """Return the memory outside the pages that a worker kept at the end of an engine."""
        return self._kept_bytes.get(number, 0)

    def engines_on(self, number: int) -> dict[str, Host]:
        """Return the hosts with an engine on a worker, by model."""
        hosts = self._hosts[number]
        return {name: host for name, host in hosts.items() if host.phase in _WITH_ENGINE}

    def engines(self) -> Engines:
        """Return the hosts with an engine, by model and worker."""
        found: Engines = {}
        for number in sorted(self._hosts):
            for model, host in self.engines_on(number).items():
                found.setdefault(model, {})[number] = host
        return found

    def lose_worker(self, number: int) -> None:
        """Record the end of a worker's process, and of all models there."""
        self._firsts.pop(number, None)
        self._kept_bytes.pop(number, None)
        self._kept_engines.pop(number, None)
        for host in self._hosts.pop(number, {}).values():
            host.move(HostEvent.LOSE_WORKER)


class DeviceSnapshots:
    """The snapshots by device.

    Devices of one degree share a snapshot. If the model cache has too little memory for a model's
    snapshots of all degrees, the devices of a degree without a snapshot rest: the engines stay, and
    the other devices serve the model.
    """

    def __init__(
        self,
        cache: SnapshotCache,
        hosts: Hosts,
        without_snapshots: Iterable[int] = (),
        degrees: Sequence[int] = (),
    ) -> None:
        """``without_snapshots`` are the numbers of the simulated devices, ``degrees`` the numbers
        of GPUs by device; further devices have one.
        """
        self._cache = cache
        self._hosts = hosts
        self._without_snapshots = frozenset(without_snapshots)
        self._degrees = dict(enumerate(degrees))
        self._resting: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def degrees(self) -> set[int]:
        """The degrees of all devices with snapshots."""
        return {self.degree(number) for number in self.needing(self._degrees)} or {1}

    def degree(self, number: int) -> int:
        """Return the number of GPUs of a device."""
        return self._degrees.get(number, 1)

    def of(self, model: str, number: int) -> SnapshotId:
        """Return the name of the snapshot that a device needs for a model."""
        return SnapshotId(model, self.degree(number))

    def all_of(self, model: str, numbers: Iterable[int]) -> list[SnapshotId]:
        """Return the names of the snapshots that devices need for a model."""
        return sorted({self.of(model, number) for number in self.needing(numbers)})

    def needing(self, numbers: Iterable[int]) -> list[int]:
        """Return the devices that need snapshots."""
        return [number for number in numbers if number not in self._without_snapshots]

    def are_attached(self, model: str, numbers: Iterable[int]) -> bool:
        """Return whether all devices that do not rest, and at least one, have the snapshot."""
        awake = [number for number in numbers if number not in self._resting[model]]
        attached = all(self._hosts.of(model, number).has_snapshot for number in awake)
        return bool(awake) and attached and all(map(self._cache.get, self.all_of(model, awake)))

    def rest(self, model: str, number: int) -> None:
        """Record that a device has no snapshot, while other devices serve the model."""
        self._resting[model].add(number)

    def wake(self, model: str, number: int) -> None:
        """Record that a device has the snapshot again, or no longer the engine."""
        self._resting[model].discard(number)

    def resting(self, model: str) -> frozenset[int]:
        """Return the devices with the engine but without a snapshot, while others serve."""
        return frozenset(self._resting[model])

    def forget(self, model: str) -> None:
        self._resting.pop(model, None)

    def slots(self, model: str, engines_of: Engines) -> dict[int, list[str]]:
        """Return the models whose engines a model can take over, by device.

        These models are of its family or, before its first load since the daemon's start, of the
        layout of its snapshot. A model has no slots where it has an engine.
        """
        family = self._hosts.families.get(model)
        if family == "":
            return {}
        snapshots = [self._cache.get(of) for of in self._cache.of_model(model)]
        layouts = {snapshot.digest for snapshot in snapshots if snapshot is not None}
        own, found = engines_of.get(model, {}), defaultdict[int, list[str]](list)
        for other, hosts in engines_of.items():
            for number, host in hosts.items():
                is_alike = (
                    host.layout_digest in layouts if family is None else host.family == family
                )
                if host.family and is_alike and number not in own:
                    found[number].append(other)
        return dict(sorted(found.items()))


class _State(Enum):
    CLOSED = 0
    OPEN = 1
    HALF_OPEN = 2


@dataclass(slots=True)
class _Breaker:
    state: _State = _State.CLOSED
    is_blocking: bool = True  # while open, no worker may load the model
    reason: str = ""
    wait_s: float = 0.0  # the latest wait; 0 before the first wait, or long after the latest
    retry_at_s: float = 0.0
    closed_at_s: float = 0.0
    crashes: list[tuple[float, int]] = field(default_factory=list)  # (time, device)
    convicted: set[str] = field(default_factory=set)


class CircuitBreakers:
    """The breakers of all models.

    A breaker is *open* after crashes attributed to the model, or when no worker could load the
    model; *half-open* when its wait is over and the model is being loaded; *closed* after success.
    A crash soon afterwards opens the breaker again with twice the wait. Times are seconds of one
    monotonic clock.
    """

    def __init__(self) -> None:
        self._breakers: dict[str, _Breaker] = {}

    def reason(self, model: str) -> str | None:
        """Return why the model may not be loaded, None if closed or half-open."""
        breaker = self._known(model)
        is_shut = breaker.state is _State.OPEN and breaker.is_blocking
        return breaker.reason if is_shut else None

    def is_shut_out(self, model: str) -> bool:
        """Return whether new workers skip the model: the breaker is open or half-open."""
        breaker = self._known(model)
        return breaker.is_blocking and breaker.state is not _State.CLOSED

    def retry_at_s(self, model: str) -> float | None:
        """Return the time of the next try, None if the model is served."""
        breaker = self._known(model)
        return None if breaker.state is _State.CLOSED else breaker.retry_at_s

    def record_crash(self, model: str, device: int, death: Death, now_s: float) -> str | None:
        """Record a crash attributed to the model; return the reason if the breaker opens."""
        breaker = self._of(model, now_s)
        recent = [crash for crash in breaker.crashes if now_s - crash[0] < WINDOW_S]
        breaker.crashes = [*recent, (now_s, device)]
        if breaker.state is _State.OPEN:
            return None
        if breaker.wait_s:
            where = f"worker of device {device} again"
        elif len(breaker.crashes) >= MAX_CRASHES:
            where = _where([device for _, device in breaker.crashes])
        else:
            return None
        doing = f", in {death.doing}" if death.doing else ""
        return self.open(model, f"ended the {where}: {death.reason}{doing}", now_s)

    def record_convicted(self, model: str, request_id: str, now_s: float) -> str | None:
        """Record a request of the model that crashed a worker alone, as :meth:`record_crash`."""
        breaker = self._of(model, now_s)
        breaker.convicted.add(request_id)
        if breaker.state is not _State.CLOSED or len(breaker.convicted) < MAX_CONVICTED:
            return None
        text = f"ended workers with {len(breaker.convicted)} requests in a row, each retried alone"
        return self.open(model, text, now_s)

    def answered(self, model: str) -> None:
        """Record that a request of the model succeeded: earlier crashes were due to requests."""
        self._known(model).convicted.clear()

    def open(self, model: str, reason: str, now_s: float, *, is_blocking: bool = True) -> str:
        """Open the breaker for a time that grows with each call; return the reason.

        If not ``is_blocking``, new workers may load the model nevertheless.
        """
        breaker = self._of(model, now_s)
        breaker.wait_s = min(max(FIRST_WAIT_S, 2 * breaker.wait_s), MAX_WAIT_S)
        breaker.state, breaker.reason, breaker.is_blocking = _State.OPEN, reason, is_blocking
        breaker.retry_at_s = now_s + breaker.wait_s
        breaker.crashes, breaker.convicted = [], set()
        return reason

    def postpone(self, model: str, now_s: float) -> None:
        """Delay the next try because the latest try was inconclusive; no effect otherwise."""
        breaker = self._known(model)
        if breaker.state is _State.HALF_OPEN:
            breaker.state, breaker.retry_at_s = _State.OPEN, now_s + FIRST_WAIT_S

    def due(self, now_s: float) -> list[str]:
        """Return the models whose wait is over."""
        return [
            model
            for model, breaker in self._breakers.items()
            if breaker.state is _State.OPEN and now_s >= breaker.retry_at_s
        ]

    def half_open(self, model: str) -> None:
        """Let the model be loaded as a trial."""
        self._breakers[model].state = _State.HALF_OPEN

    def is_half_open(self, model: str) -> bool:
        """Return whether the model is being loaded as a trial."""
        return self._known(model).state is _State.HALF_OPEN

    def close(self, model: str, now_s: float) -> bool:
        """Record a successful load; return whether the breaker closes."""
        breaker = self._known(model)
        if breaker.state is _State.CLOSED:
            return False
        if breaker.state is _State.OPEN and breaker.is_blocking:
            return False  # the load began before the breaker opened
        breaker.state, breaker.closed_at_s = _State.CLOSED, now_s
        return True

    def reset(self, model: str) -> None:
        """Forget the model's record, after a user's request or the removal of the model."""
        self._breakers.pop(model, None)

    def _known(self, model: str) -> _Breaker:
        """Return the model's breaker; without one a new breaker, which is not kept."""
        return self._breakers.get(model) or _Breaker()

    def _of(self, model: str, now_s: float) -> _Breaker:
        """Return the model's breaker.

        The wait starts again from the minimum after a time without a crash as long as the last
        wait, and at least the window.
        """
        breaker = self._breakers.setdefault(model, _Breaker())
        quiet_s = max(WINDOW_S, breaker.wait_s)
        if breaker.state is _State.CLOSED and now_s - breaker.closed_at_s > quiet_s:
            breaker.wait_s = 0.0
        return breaker


def _where(devices: list[int]) -> str:
    distinct = sorted(set(devices))
    if len(distinct) == 1:
        return f"worker of device {distinct[0]} twice"
    return f"workers of devices {' and '.join(map(str, distinct))}"
