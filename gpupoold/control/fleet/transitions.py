"""The phases of a model and of a model on a host, and the transitions between phases. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum, auto
from typing import Generic, TypeVar

from gpupoold.scheduling.phases import IllegalTransition

_NUM_REMEMBERED = 5


class ModelPhase(Enum):
    """The phase of a model's life."""

    REMOVED = auto()  # first and last: no model has the name
    CHECKING = auto()  # a client adds the model; the checkpoint is being found or checked
    DOWNLOADING = auto()
    REGISTERED = auto()  # in the registry, not loaded since the daemon's start
    LOADING = auto()  # no device has the model, or no frontend has mounted the API
    READY = auto()  # requests can be served
    DRAINING = auto()  # takes no requests, because the model is being removed or unloaded
    FAILED = auto()  # no device could load the model; a retry follows
    QUARANTINED = auto()  # ended its workers; no device may load the model before the retry


class ModelEvent(Enum):
    """A cause of a model's transition."""

    PROPOSE = auto()  # a client asks to add the model
    DOWNLOAD = auto()
    CHECK = auto()
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

# While a model drains, changes of devices and failed loads are no events: the state after the
# drain decides between FAIL, QUARANTINE and RESUME.
MODEL_TRANSITIONS: Mapping[tuple[ModelPhase, ModelEvent], ModelPhase] = {
    (_M.REMOVED, _E.PROPOSE): _M.CHECKING,
    (_M.REMOVED, _E.REGISTER): _M.REGISTERED,  # read from the registry when the daemon starts
    (_M.CHECKING, _E.CHECK): _M.CHECKING,
    (_M.CHECKING, _E.DOWNLOAD): _M.DOWNLOADING,
    (_M.DOWNLOADING, _E.DOWNLOAD): _M.DOWNLOADING,
    (_M.DOWNLOADING, _E.CHECK): _M.CHECKING,
    (_M.CHECKING, _E.REGISTER): _M.REGISTERED,
    (_M.REGISTERED, _E.LOAD): _M.LOADING,
    (_M.FAILED, _E.LOAD): _M.LOADING,
    (_M.QUARANTINED, _E.LOAD): _M.LOADING,
    (_M.LOADING, _E.OPEN): _M.READY,
    (_M.READY, _E.LOSE_DEVICES): _M.LOADING,
    (_M.REGISTERED, _E.FAIL): _M.FAILED,
    (_M.LOADING, _E.FAIL): _M.FAILED,
    (_M.FAILED, _E.FAIL): _M.FAILED,
    (_M.DRAINING, _E.FAIL): _M.FAILED,
    (_M.QUARANTINED, _E.FAIL): _M.FAILED,  # a retry has failed
    (_M.REGISTERED, _E.QUARANTINE): _M.QUARANTINED,
    (_M.LOADING, _E.QUARANTINE): _M.QUARANTINED,
    (_M.READY, _E.QUARANTINE): _M.QUARANTINED,
    (_M.FAILED, _E.QUARANTINE): _M.QUARANTINED,
    (_M.DRAINING, _E.QUARANTINE): _M.QUARANTINED,
    (_M.QUARANTINED, _E.QUARANTINE): _M.QUARANTINED,
    (_M.REGISTERED, _E.DRAIN): _M.DRAINING,
    (_M.LOADING, _E.DRAIN): _M.DRAINING,
    (_M.READY, _E.DRAIN): _M.DRAINING,
    (_M.FAILED, _E.DRAIN): _M.DRAINING,
    (_M.QUARANTINED, _E.DRAIN): _M.DRAINING,
    (_M.DRAINING, _E.RESUME): _M.LOADING,
    **{(phase, _E.REMOVE): _M.REMOVED for phase in ModelPhase if phase is not _M.REMOVED},
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

        Raises:
            IllegalTransition: the table has no such transition. The message has the subject, the
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
