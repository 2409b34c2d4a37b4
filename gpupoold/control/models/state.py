"""The state of a model on the devices and the devices that the model should have. Pure.

Decisions (:mod:`gpupoold.control.models.steps`) read a state and a plan; nothing else decides when
a model is loaded, warmed, opened or unloaded from a device.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gpupoold.control.fleet.transitions import HostPhase, ModelPhase
from gpupoold.control.weights.host_budget import Space
from gpupoold.errors import Refused
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
    """The kinds of steps."""

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

    ``reason`` is that of LOAD, and ``cause`` that of FAIL. No other step of the model but OPEN runs
    beside a step that ``is_alone``.
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
    model is gone. ``is_held``: another part changes the
    model. ``is_loaded``: loaded before, and not withdrawn since. ``is_recorded``: the registry has
    the state and its reason. ``is_shut_out``: in quarantine. ``is_trial``: the wait after a failure
    is over. ``num_waiting`` requests wait for the weights, of ``num_live``. ``retry_at_s`` has the
    next tries by the key of the failed step, and ``waits_since_s`` the beginning of a wait for a
    first device or for memory.
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
        any(model.allows(one.number) for one in devices),
    )
