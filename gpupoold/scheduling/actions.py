"""Actions of the scheduling core. Plain data, carried out by the shell in order."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Role


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn: ``model`` runs for ``quota_s`` once resident, or longer while no other model
    waits.

    A step takes at most ``chunk_tokens``, prompt tokens plus one per answer, so that a prompt does
    not delay answers beyond their target; None means the engine's limit.
    """

    turn_id: int
    model: str
    quota_s: float
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Send a request to a device for prefill and decoding."""

    request_id: str
    device: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """Migrate a request with a token, and its KV, to another device."""

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StartTurn:
    """The present turn of a device, and the next model, to be prefetched meanwhile.

    A turn with the id of the present turn may change its quota, counted from the turn's start. With
    ``then`` None the turn continues past its quota. A device whose turn ends prepares for ``then``
    at once, without waiting for orders.
    """

    device: int
    turn: Turn | None
    then: str | None


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """Change a device's role; the core's state has the new role already."""

    device: int
    role: Role


Action = Send | Migrate | StartTurn | ChangeRole
