"""A bound on the tail of any distribution."""

from __future__ import annotations

import math

from gpupoold.latency.errors import LatencyError


def cantelli_factor(tail_probability: float) -> float:
    """Return the number of standard deviations that are rarely exceeded, for any distribution.

    A value exceeds the mean by more than ``sqrt((1 - tau) / tau)`` deviations with at most the
    probability ``tau`` (Aladdin, appendix G).
    """
    if not 0 < tail_probability < 1:
        raise LatencyError(f"a tail probability is between 0 and 1, got {tail_probability}")
    return math.sqrt((1 - tail_probability) / tail_probability)
