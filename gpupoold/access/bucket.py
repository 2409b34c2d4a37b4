"""How much may be used up in a time: a token bucket. Pure: the clock is the caller's."""

from __future__ import annotations

import math

_WINDOW_S = 60.0


class Bucket:
    """Holds at most ``per_minute`` and fills up at that pace; full at first.

    What its user is known to have used is taken out, even what is not there: then it is in
    debt, and nothing may be begun until it has enough again. So in any time of ``t`` seconds
    no more is begun than ``per_minute * (1 + t / 60)``; where the last thing begun takes more
    than was there, by that much more.
    """

    def __init__(self, per_minute: float, now_s: float, level: float | None = None) -> None:
        """``level``: what is in it, if it is not full; at most ``per_minute``.

        Raises:
            ValueError: a rate that is not above zero and finite.
        """
        if not 0 < per_minute < math.inf:
            raise ValueError(f"a rate must be above zero and finite, got {per_minute}")
        self.per_minute = per_minute
        self._level = per_minute if level is None else min(level, per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """What is in it; below zero: the debt."""
        if now_s > self._at_s:
            filled = self._level + (now_s - self._at_s) * self.per_minute / _WINDOW_S
            self._level, self._at_s = min(filled, self.per_minute), now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until so much is in it; 0 if it is now. More than it can hold counts as all."""
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(missing, 0.0) * _WINDOW_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """So much has been used."""
        self._level = self.level(now_s) - amount
