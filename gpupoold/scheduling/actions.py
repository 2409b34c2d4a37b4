"""What the scheduling core wants done. Plain data, carried out by the shell in order."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import Role


@dataclass(frozen=True, slots=True)
class Turn:
    """``model`` runs for ``quota_s`` once resident, or longer while nobody waits.

    A step takes ``chunk_tokens`` at most, prompt tokens and one for each answer, so that a
    prompt keeps answers within their time between tokens; None: as many as the engine takes.
    """

    turn_id: int
    model: str
    quota_s: float
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """Let a device have a request: it is prefilled there, then decoded as turns allow."""

    request_id: str
    device: int


@dataclass(frozen=True, slots=True)
class Migrate:
    """Move a request that has its first token, with its KV, to another device."""

    request_id: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StartTurn:
    """What a device does now, and the model to bring in meanwhile, whose turn is next.

    A turn with the id of the one under way may have another quota than before, counted
    from when it began. ``then`` None: the turn goes on past its quota. A device whose turn
    ends makes ready for ``then`` at once, without waiting for orders.
    """

    device: int
    turn: Turn | None
    then: str | None


@dataclass(frozen=True, slots=True)
class ChangeRole:
    """The policy gives a device another role; the core goes by it already."""

    device: int
    role: Role


Action = Send | Migrate | StartTurn | ChangeRole
