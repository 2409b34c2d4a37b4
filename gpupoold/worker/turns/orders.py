"""The worker's orders: the present turn, and the model to prepare next."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gpupoold.wire.messages import RunTurn


@dataclass(frozen=True, slots=True)
class OrderedTurn:
    """A turn: ``model`` runs for ``quota_s`` once resident, or longer while no other model
    waits.

    Its steps take at most ``chunk_tokens``, if set.
    """

    turn_id: int
    model: str
    quota_s: float
    chunk_tokens: int | None = None


class Orders:
    """The latest valid order of the daemon. Pure bookkeeping."""

    def __init__(self) -> None:
        self.turn: OrderedTurn | None = None
        self.then: str | None = None
        self._began_s = math.inf
        self._last_ended = 0

    def take(self, order: RunTurn) -> None:
        """Take a new order. Ignore orders for a turn that has already ended."""
        if order.turn_id <= self._last_ended:
            return
        if self.turn is None or order.turn_id != self.turn.turn_id:
            self._began_s = math.inf
        self.turn = OrderedTurn(order.turn_id, order.model, order.quota_s, order.chunk_tokens)
        self.then = order.then

    def drop(self) -> None:
        """Drop the present turn without a report."""
        self.turn, self.then, self._began_s = None, None, math.inf

    def began(self, now_s: float) -> None:
        """Record that the turn's model is resident; only the first call of a turn counts."""
        self._began_s = min(self._began_s, now_s)

    @property
    def began_s(self) -> float | None:
        """The time when the turn's model was first resident, None before."""
        return self._began_s if math.isfinite(self._began_s) else None

    def is_quota_used(self, now_s: float) -> bool:
        """Return whether another model waits and the turn has used its quota."""
        if self.turn is None or self.then is None:
            return False
        return now_s >= self._began_s + self.turn.quota_s

    def end(self) -> tuple[int, str | None]:
        """End the turn; return its id, and the model to prepare next."""
        assert self.turn is not None
        ended, then = self.turn.turn_id, self.then
        self._last_ended = max(self._last_ended, ended)
        self.drop()
        return ended, then
