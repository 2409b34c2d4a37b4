"""Rates of API keys: token buckets, and counted use. Pure: the caller gives the time."""

from __future__ import annotations

import math
from typing import NamedTuple

_WINDOW_S = 60.0


class Bucket:
    """A token bucket that holds at most ``per_minute`` and refills at that rate; full at first.

    A user may take more than the level. The level is then negative (a debt), and no new use may
    begin until the level is high enough. In any ``t`` seconds, uses that begin take at most
    ``per_minute * (1 + t / 60)``, plus the excess of the last use.
    """

    def __init__(self, per_minute: float, now_s: float, level: float | None = None) -> None:
        """Start with ``level``, at most ``per_minute``; None means full.

        Raises ValueError: the rate is not positive and finite.
        """
        if not 0 < per_minute < math.inf:
            raise ValueError(f"a rate must be above zero and finite, got {per_minute}")
        self.per_minute = per_minute
        self._level = per_minute if level is None else min(level, per_minute)
        self._at_s = now_s

    def level(self, now_s: float) -> float:
        """Return the level at ``now_s``; a negative level is a debt."""
        if now_s > self._at_s:
            filled = self._level + (now_s - self._at_s) * self.per_minute / _WINDOW_S
            self._level, self._at_s = min(filled, self.per_minute), now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Return the seconds until the level is ``amount``, 0 if the level suffices now.

        An ``amount`` above the capacity counts as the capacity.
        """
        missing = min(amount, self.per_minute) - self.level(now_s)
        return max(missing, 0.0) * _WINDOW_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        self._level = self.level(now_s) - amount


class RateUse(NamedTuple):
    """Numbers of begun requests, and of tokens of prompts and answers."""

    num_requests: int = 0
    num_tokens: int = 0

    def __add__(self, other: RateUse) -> RateUse:  # type: ignore[override]
        return RateUse(self.num_requests + other.num_requests, self.num_tokens + other.num_tokens)

    def __sub__(self, other: RateUse) -> RateUse:
        return RateUse(self.num_requests - other.num_requests, self.num_tokens - other.num_tokens)
