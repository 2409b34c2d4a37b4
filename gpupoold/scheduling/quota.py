"""Turn lengths of a decode round (Aegaeon, section 4.3, equations 2 and 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MIN_ALPHA = 0.5
# Less than a nanosecond of switching counts as none, because quotients would underflow.
_LEAST_SWITCH_S = 1e-9


@dataclass(frozen=True, slots=True)
class TurnLoad:
    """A batch of the round: its token target and its step time in seconds."""

    tbt_s: float
    step_s: float

    @property
    def tokens_per_target(self) -> float:
        """``n = d/t``: steps of the batch in the time of one token target."""
        return self.tbt_s / self.step_s


def round_quotas_s(loads: Sequence[TurnLoad], switch_s: float, quota_max_s: float) -> list[float]:
    """Return each batch's quota in seconds for a round that spends ``switch_s`` on switching.

    ``alpha = max(c/(min n * Q_MAX) + sum 1/n, 0.5)``, ``q_i = c/(n_i * (alpha - sum 1/n))``. With
    ``c = 0`` the formula is 0/0 or 0: then switching is free, and every batch gets the time of one
    token target split by need, ``q_i = d_min * (1/n_i) / max(sum 1/n, 0.5)``, so that short turns
    can meet every deadline.
    """
    counts = [load.tokens_per_target for load in loads]
    need = sum(1 / count for count in counts)
    if switch_s < _LEAST_SWITCH_S:
        shortest_s = min(load.tbt_s for load in loads)
        return [
            max(load.step_s, shortest_s / count / max(need, MIN_ALPHA))
            for load, count in zip(loads, counts, strict=True)
        ]
    # alpha - need, written so that a small c is not lost beside a large need.
    spare = max(switch_s / (min(counts) * quota_max_s), MIN_ALPHA - need)
    return [switch_s / (count * spare) for count in counts]
