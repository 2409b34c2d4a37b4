"""The state of a model, the next steps, and what failed steps mean. Pure.

Decisions read a state (:class:`ModelView`) and a plan (:class:`HostingPlan`); nothing else decides
when a model is loaded, warmed, opened or unloaded from a device.

A model is *warm* when the snapshot is attached to all devices that do not rest. A load that makes a
snapshot, and each step that changes the snapshot, runs alone; loads from a present snapshot run
side by side.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum, auto

from gpupoold.control.fleet.states import HostPhase, ModelPhase
from gpupoold.control.weights.cache import CacheFull, Space
from gpupoold.control.workers.worker import WorkerEnded, WorkerIsDown
from gpupoold.errors import GpupoolError, Refused, TimedOut, Unavailable
from gpupoold.scheduling.hosting import (
    HostingChoice,
    HostingDevice,
    HostingModel,
    HostingReason,
    choose,
)


class EnginesFull(Refused):
    """A device has too little memory for another engine, and no engine can be evicted."""


class StepKind(StrEnum):
    """Kinds of steps."""

    LOAD = "load"  # the engine on a device, with the snapshot or making the snapshot
    OPEN = "open"  # mount the API on the frontends
    BRING = "bring"  # the snapshot of a degree to host memory and to the devices of the degree
    REST = "rest"  # the devices of a degree serve no requests for lack of host memory
    LEAVE = "leave"  # unload the engine from a device
    EVICT = "evict"  # unload an idle engine from a device, where another model claims the place
    REPLACE = "replace"  # build an engine with the model's options beside the engine on a device
    RENEW = "renew"  # make damaged snapshots again
    WITHDRAW = "withdraw"  # take a model in quarantine off the frontends and all devices
    REMOVE = "remove"  # unload a model everywhere, and forget the model and its snapshots
    FAIL = "fail"  # end a wait that has lasted too long, or that is in vain


class Cause(StrEnum):
    """What a model waits for."""

    MEMORY = "host memory for the weights"
    ENGINES = "memory for the engine on a device"
    SERVICE = "a device in service"
    PLACE = "an idle engine that leaves the device"
    RETRY = "the next try of a load that has failed"


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A step of a model; ``number`` is the device, or the degree of BRING, REST and FAIL.

    ``reason`` is that of LOAD and REPLACE, and ``cause`` that of FAIL. No other step of the model
    but OPEN runs beside a step that ``is_alone``.
    """

    kind: StepKind
    number: int = 0
    is_alone: bool = False
    reason: HostingReason = HostingReason.NEEDED
    cause: Cause = Cause.MEMORY

    @property
    def key(self) -> str:
        """The name of the step in the records of failures."""
        return self.kind if self.kind is StepKind.FAIL else f"{self.kind} {self.number}"


@dataclass(frozen=True, slots=True)
class HostState:
    """A device, as seen by a model.

    The engine of a device that ``is_outdated`` has other options than the model. ``degree`` is 0
    for a device that needs no snapshot. A device that ``is_idle`` can begin a load
    of this model now, and a device that ``is_new`` tries all models, also those that have failed.
    """

    phase: HostPhase = HostPhase.ABSENT
    degree: int = 1
    is_idle: bool = True
    is_new: bool = False
    is_resting: bool = False
    is_outdated: bool = False


@dataclass(frozen=True, slots=True)
class WeightsState:
    """The snapshot for the devices of one degree; ``space`` is for a snapshot not in the cache."""

    is_cached: bool = False
    space: Space = Space.FITS


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model now; times are seconds of the monotonic clock.

    ``devices`` serve the model. ``is_added``: a client adds the model, and undoes a failure.
    ``is_wished``: a user waits until the model is warm. ``is_removed``: a client waits until the
    model is gone. ``is_held``: another part changes the model. ``is_loaded``: loaded before, and
    not withdrawn since. ``is_recorded``: the registry has the state and its reason.
    ``is_shut_out``: in quarantine. ``is_trial``: the wait after a failure is over. ``num_waiting``
    requests wait for the weights, of ``num_live``. ``retry_at_s`` has the next tries by the key of
    the failed step, and ``waits_since_s`` the beginning of a wait for a first device or for memory.
    """

    phase: ModelPhase = ModelPhase.READY
    hosts: Mapping[int, HostState] = field(default_factory=dict)
    weights: Mapping[int, WeightsState] = field(default_factory=dict)
    devices: tuple[int, ...] = ()
    is_open: bool = True
    is_evicted: bool = False
    is_damaged: bool = False
    is_loaded: bool = False
    is_recorded: bool = True
    is_shut_out: bool = False
    is_failed: bool = False
    is_trial: bool = False
    is_held: bool = False
    is_added: bool = False
    is_wished: bool = False
    is_removed: bool = False
    num_waiting: int = 0
    num_live: int = 0
    under_way: frozenset[ModelStep] = frozenset()
    retry_at_s: Mapping[str, float] = field(default_factory=dict)
    waits_since_s: float | None = None


@dataclass(frozen=True, slots=True)
class HostingPlan:
    """The devices that should load a model, the best first, and the devices to leave.

    From a device in ``evict`` the engine, which is idle, makes place for another model's.
    ``may_start``: a worker that may host the model starts for the first time. ``has_devices``: a
    device in service may host the model.
    """

    loads: tuple[HostingChoice, ...] = ()
    leave: frozenset[int] = frozenset()
    evict: frozenset[int] = frozenset()
    may_start: bool = False
    has_devices: bool = True


def desired(
    model: HostingModel,
    serving: Collection[int],
    devices: Sequence[HostingDevice],
    starting: Collection[int] = (),
    claimed: Collection[int] = (),
) -> HostingPlan:
    """Return the plan of a model that the devices ``serving`` serve.

    Devices that were not chosen by hand are left when a chosen device serves. The numbers
    ``starting`` are of workers that start for the first time, ``claimed`` of devices where the
    model's idle engine makes place.
    """
    is_chosen = bool(model.fixed.intersection(serving))
    return HostingPlan(
        tuple(choose(model, devices)),
        frozenset(serving) - model.fixed if is_chosen else frozenset(),
        frozenset(claimed),
        any(model.allows(number) for number in starting),
        any(model.allows(device.number) for device in devices),
    )


STARTING_S = 30.0
"""The longest time for which a client waits for a worker that starts for the first time."""

_K, _P = StepKind, ModelPhase
_ALIVE = frozenset({_P.REGISTERED, _P.LOADING, _P.READY, _P.FAILED, _P.QUARANTINED})
_NO_WAIT = frozenset({Space.FITS, Space.EVICTS})


@dataclass(frozen=True, slots=True)
class ModelWait:
    """A wait until ``until_s``, then FAIL; ``degree`` is that of the snapshot without memory."""

    cause: Cause
    until_s: float = math.inf
    degree: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """The steps to begin now; ``blocked`` are the devices of loads that wait for other steps."""

    steps: tuple[ModelStep, ...] = ()
    blocked: frozenset[int] = frozenset()
    wait: ModelWait | None = None


def next_steps(
    model: ModelView, plan: HostingPlan, load_timeout_s: float, now_s: float
) -> Decision:
    """Return the steps that a model should begin now beside the steps under way."""
    if model.is_removed:
        return Decision(() if model.under_way else (ModelStep(_K.REMOVE, is_alone=True),))
    if plan.evict and not (model.is_held or model.under_way):
        return Decision((ModelStep(_K.EVICT, min(plan.evict), is_alone=True),))
    is_awaited = model.phase is _P.DRAINING and model.num_waiting > 0  # the drain waits too
    is_alive = model.phase in _ALIVE or is_awaited or model.is_added
    outdated = [device for device in model.devices if model.hosts[device].is_outdated]
    if model.is_held or not (is_alive or outdated):
        return Decision()
    if model.is_shut_out and not model.is_trial:
        return _withdrawal(model, now_s)
    loads = [step for step in model.under_way if step.kind in (_K.LOAD, _K.REPLACE)]
    if any(step.is_alone for step in model.under_way):
        return Decision(blocked=frozenset(load.device for load in plan.loads))
    if model.is_damaged:
        step = ModelStep(_K.RENEW, is_alone=True)
        is_due = not loads and now_s >= model.retry_at_s.get(step.key, 0.0)
        return Decision((step,) if is_due else ())
    opens = _opens(model, now_s)
    replacements = _replacements(model, outdated, now_s) if outdated else None
    if replacements is not None:
        blocked = frozenset(load.device for load in plan.loads)
        return Decision((*opens, *replacements), blocked)
    if not is_alive:
        return Decision()
    weights = _weights(model, load_timeout_s, now_s)
    if weights is not None:
        return Decision((*opens, *(() if loads else weights.steps)), wait=weights.wait)
    if is_awaited and not model.is_evicted:
        return Decision(opens)
    if plan.leave and not model.is_added:
        number = min(plan.leave)
        step = ModelStep(_K.LEAVE, number, is_alone=True)
        if not loads and now_s >= model.retry_at_s.get(step.key, 0.0):
            return Decision((*opens, step))
        if loads:
            return Decision(opens)
    rest = _loads(model, plan, loads, load_timeout_s, now_s)
    return Decision((*opens, *rest.steps), rest.blocked, rest.wait)


def _withdrawal(model: ModelView, now_s: float) -> Decision:
    """Return the step that takes a model in quarantine off all devices, when no step is left."""
    step, gone = ModelStep(_K.WITHDRAW, is_alone=True), (HostPhase.ABSENT, HostPhase.UNLOADING)
    is_gone = not model.is_loaded and all(host.phase in gone for host in model.hosts.values())
    is_gone = is_gone and model.is_recorded
    is_due = now_s >= model.retry_at_s.get(step.key, 0.0) and not model.under_way
    return Decision((step,) if is_due and not is_gone else ())


def _replacements(
    model: ModelView, outdated: Sequence[int], now_s: float
) -> tuple[ModelStep, ...] | None:
    """Return the steps towards engines with the model's options, None if no step is due.

    Resting engines leave, for whose snapshots there is no memory. One engine of each degree makes
    the snapshot, then the other engines are replaced side by side.
    """
    hosts = model.hosts
    done = {hosts[device].degree for device in model.devices if not hosts[device].is_outdated}
    resting = [device for device in outdated if hosts[device].is_resting]
    firsts = [device for device in outdated if hosts[device].degree not in done]
    steps = [_replacement(model, device) for device in outdated]
    if resting:
        steps = [ModelStep(_K.LEAVE, resting[0], is_alone=True)]
    elif firsts:
        steps = [replace(_replacement(model, firsts[0]), is_alone=True)]
    due = [step for step in steps if now_s >= model.retry_at_s.get(step.key, 0.0)]
    if not (due or model.under_way.intersection(steps)):
        return None
    is_free = model.under_way <= {
        ModelStep(_K.OPEN),
        *(step for step in steps if not step.is_alone),
    }
    return tuple(step for step in due if is_free and step not in model.under_way)


def _replacement(model: ModelView, number: int) -> ModelStep:
    """Return the step; a try after a failure, which may be the model's own, evicts no engine."""
    step = ModelStep(_K.REPLACE, number)
    return replace(step, reason=HostingReason.SPARE) if step.key in model.retry_at_s else step


def _opens(model: ModelView, now_s: float) -> tuple[ModelStep, ...]:
    """Return the step that mounts the API of a model with a device."""
    step = ModelStep(_K.OPEN)
    is_due = not model.is_open or model.is_trial or model.phase in (_P.FAILED, _P.QUARANTINED)
    is_late = now_s >= model.retry_at_s.get(step.key, 0.0)
    can_open = bool(model.devices) and step not in model.under_way
    return (step,) if can_open and is_due and is_late else ()


def _needing(model: ModelView) -> Mapping[int, HostState]:
    """Return the devices with the engine that need a snapshot."""
    return {device: model.hosts[device] for device in model.devices if model.hosts[device].degree}


def _awake(model: ModelView) -> Mapping[int, HostState]:
    return {number: host for number, host in _needing(model).items() if not host.is_resting}


def _lacking(model: ModelView) -> set[int]:
    """Return the degrees whose devices do not all have the snapshot; resting devices may lack."""
    return {
        host.degree
        for host in _awake(model).values()
        if host.phase is not HostPhase.ATTACHED or not model.weights[host.degree].is_cached
    }


def _weights(model: ModelView, load_timeout_s: float, now_s: float) -> Decision | None:
    """Return the steps towards a warm model, None if the weights may stay as they are."""
    needing, awake, lacking = _needing(model), _awake(model), _lacking(model)
    resting = {host.degree for host in needing.values() if host.is_resting}
    if needing and not awake:
        lacking = resting
    is_asked = model.num_waiting > 0 or model.is_wished or (not awake and model.num_live > 0)
    if lacking and is_asked:
        return _bring(model, lacking, resting, load_timeout_s, now_s)
    room = _NO_WAIT if model.is_wished else {Space.FITS} if model.num_live else set()
    for degree in sorted(resting - lacking):
        if _has_space(model, degree, room, now_s):
            return Decision((ModelStep(_K.BRING, degree, is_alone=True),))
    return None


def _bring(
    model: ModelView, lacking: set[int], resting: set[int], load_timeout_s: float, now_s: float
) -> Decision:
    """Return the next degree to bring; degrees without memory rest if others serve."""
    ranked = sorted(
        lacking, key=lambda device: (not model.weights[device].is_cached, device in resting)
    )
    for degree in ranked:
        if _has_space(model, degree, _NO_WAIT, now_s):
            return Decision((ModelStep(_K.BRING, degree, is_alone=True),))
    if {host.degree for host in _awake(model).values()} - lacking:
        return Decision(tuple(ModelStep(_K.REST, degree, is_alone=True) for degree in ranked))
    never = all(model.weights[device].space is Space.NEVER for device in ranked)
    until_s = now_s if never else _since_s(model, now_s) + load_timeout_s
    return _waiting(model, ModelWait(Cause.MEMORY, until_s, ranked[0]), now_s)


def _has_space(
    model: ModelView, degree: int, room: frozenset[Space] | set[Space], now_s: float
) -> bool:
    weights, key = model.weights[degree], ModelStep(_K.BRING, degree).key
    is_late = now_s >= model.retry_at_s.get(key, 0.0)
    return is_late and (weights.is_cached or weights.space in room)


def _loads(
    model: ModelView,
    plan: HostingPlan,
    loads: Sequence[ModelStep],
    load_timeout_s: float,
    now_s: float,
) -> Decision:
    """Return the loads to begin: of a model on trial, or being added, one until a device serves."""
    is_single = not model.devices and (model.is_trial or model.is_added)
    begun: list[ModelStep] = []
    blocked: set[int] = set()
    without_memory: list[int] = []
    for choice in plan.loads:
        step = _load(model, choice)
        host = model.hosts[choice.device]
        is_late = now_s >= model.retry_at_s.get(step.key, 0.0)
        is_busy = any(load.number == choice.device for load in loads)
        if is_busy or not is_late or not (_is_wanted(model) or host.is_new):
            continue
        others = [*begun, *loads]
        if step.is_alone and model.weights[host.degree].space not in _NO_WAIT:
            without_memory.append(host.degree)
        elif not host.is_idle or (others and (step.is_alone or is_single or others[0].is_alone)):
            blocked.add(choice.device)
        else:
            begun.append(step)
    if model.devices or begun or loads or blocked or not _is_wanted(model):
        return Decision(tuple(begun), frozenset(blocked))
    if model.is_evicted and not (model.num_live or model.is_wished):
        return Decision()
    return _no_device(model, plan, without_memory, load_timeout_s, now_s)


def _load(model: ModelView, choice: HostingChoice) -> ModelStep:
    """Return the step, which is alone if the device has to make the snapshot."""
    degree = model.hosts[choice.device].degree
    is_alone = bool(degree) and not model.weights[degree].is_cached
    return ModelStep(_K.LOAD, choice.device, is_alone, choice.reason)


def _is_wanted(model: ModelView) -> bool:
    """Return whether all devices may load the model; else only a new worker tries."""
    return model.is_trial or model.is_wished or model.is_added or not model.is_failed


def _no_device(
    model: ModelView,
    plan: HostingPlan,
    without_memory: Sequence[int],
    load_timeout_s: float,
    now_s: float,
) -> Decision:
    """Return the wait of a model without a device, or the end of the wait.

    An addition waits only for a worker that starts, and a trial or a user for memory of the host
    too. A model that nobody asks for waits without a limit for memory of engines, or for a device.
    """
    since_s, degree = _since_s(model, now_s), next(iter(without_memory), 0)
    cause = Cause.RETRY if plan.loads else Cause.ENGINES if plan.has_devices else Cause.SERVICE
    cause = Cause.MEMORY if degree else cause
    start_s = STARTING_S if cause is Cause.SERVICE and plan.may_start else 0.0
    if model.is_added:
        until_s = since_s + start_s
    elif cause is Cause.MEMORY or model.is_evicted:
        until_s = since_s + max(start_s, load_timeout_s)
    else:
        until_s = since_s + start_s if model.is_trial or model.is_wished else math.inf
    if degree and all(model.weights[device].space is Space.NEVER for device in without_memory):
        until_s = now_s
    return _waiting(model, ModelWait(cause, until_s, degree), now_s)


def _since_s(model: ModelView, now_s: float) -> float:
    return now_s if model.waits_since_s is None else model.waits_since_s


def _waiting(model: ModelView, wait: ModelWait, now_s: float) -> Decision:
    step = ModelStep(_K.FAIL, wait.degree, is_alone=True, cause=wait.cause)
    if now_s < max(wait.until_s, model.retry_at_s.get(step.key, 0.0)):
        return Decision(wait=wait)
    return Decision((step,), wait=wait)


class FailureVerdict(Enum):
    """What a failed step means."""

    LATER = auto()  # nothing yet: the step is tried again, here or elsewhere
    NOTED = auto()  # recorded; other devices serve or load
    RAISED = auto()  # told to the client that waits
    POSTPONED = auto()  # the trial told nothing
    FAILED_AGAIN = auto()  # the next wait is longer
    NOT_WARMED = auto()  # the waiting requests end
    NOT_LOADED = auto()  # the model has failed


_FULL = (EnginesFull, TimedOut, Unavailable)


def verdict(model: ModelView, step: ModelStep, error: GpupoolError) -> FailureVerdict:
    """Return what the failure of a step means for a model whose state was ``model`` then."""
    is_ended = isinstance(error, WorkerEnded)
    match step.kind:
        case _K.LEAVE | _K.EVICT | _K.REST | _K.WITHDRAW:
            return FailureVerdict.LATER
        case _K.BRING | _K.RENEW:
            # Another worker can do the work, or the requests wait for the next worker.
            is_full = isinstance(error, CacheFull) and step.kind is _K.BRING
            return FailureVerdict.LATER if is_ended or is_full else FailureVerdict.NOT_WARMED
        case _K.OPEN if not model.is_added:
            return FailureVerdict.FAILED_AGAIN if model.is_trial else FailureVerdict.NOTED
        case _K.REMOVE | _K.REPLACE | _K.OPEN:
            return FailureVerdict.RAISED
        case _K.FAIL:
            return _end_of_wait(model, error)
    is_full = isinstance(error, EnginesFull)
    others = any(other.kind is _K.LOAD and other != step for other in model.under_way)
    if model.devices or others:
        waits = is_ended or isinstance(error, (CacheFull, *_FULL))
        return FailureVerdict.LATER if waits else FailureVerdict.NOTED
    if model.is_added:
        is_later = is_full or isinstance(error, WorkerIsDown)
        return FailureVerdict.LATER if is_later else FailureVerdict.RAISED
    if is_full or (isinstance(error, CacheFull) and _is_taken(model, step)):
        return FailureVerdict.LATER
    if model.is_trial:
        is_unclear = is_ended or isinstance(error, Unavailable)
        return FailureVerdict.POSTPONED if is_unclear else FailureVerdict.FAILED_AGAIN
    if is_ended:
        return FailureVerdict.LATER
    return FailureVerdict.NOT_WARMED if model.is_evicted else FailureVerdict.NOT_LOADED


def _is_taken(model: ModelView, step: ModelStep) -> bool:
    """Return whether other snapshots have taken the memory since the step began."""
    weights = model.weights.get(model.hosts[step.number].degree)
    return weights is not None and weights.space is Space.LATER


def _end_of_wait(model: ModelView, error: GpupoolError) -> FailureVerdict:
    if model.is_added:
        return FailureVerdict.RAISED
    if model.is_trial:
        is_unclear = isinstance(error, Unavailable)
        return FailureVerdict.POSTPONED if is_unclear else FailureVerdict.FAILED_AGAIN
    if model.devices or model.is_evicted:
        return FailureVerdict.NOT_WARMED
    has_failed = model.is_failed or isinstance(error, (CacheFull, TimedOut))
    return FailureVerdict.NOT_LOADED if has_failed else FailureVerdict.RAISED
