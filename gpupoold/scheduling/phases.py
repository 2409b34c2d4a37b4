"""The phases of a request, and the transitions between phases."""

from __future__ import annotations

from enum import Enum, auto


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
