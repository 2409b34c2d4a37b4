"""Closed forms on top of latencies: slack, tail bounds and group sizes."""

from __future__ import annotations

import math

from gpupoold.latency.errors import LatencyError


def slack_s(num_tokens: int, tbt_s: float, step_s: float) -> float:
    """Return the delay that ``num_tokens`` decoded steps earn: ``n (d - t)`` (Aegaeon, section
    4.3).

    A request with ``num_tokens`` tokens in steps of ``step_s`` may wait this long before its next
    token is late. Negative if steps are slower than the target.
    """
    if num_tokens < 0:
        raise LatencyError(f"tokens cannot be negative, got {num_tokens}")
    return num_tokens * (tbt_s - step_s)


def cantelli_factor(tail_probability: float) -> float:
    """Return the number of standard deviations for :func:`tail_bound_s`, for any distribution.

    A value exceeds the mean by more than ``sqrt((1 - tau) / tau)`` deviations with at most the
    probability ``tau`` (Aladdin, appendix G).
    """
    if not 0 < tail_probability < 1:
        raise LatencyError(f"a tail probability is between 0 and 1, got {tail_probability}")
    return math.sqrt((1 - tail_probability) / tail_probability)


def tail_bound_s(mean_s: float, deviation_s: float, tail_probability: float) -> float:
    """Return the latency exceeded with at most this probability, from mean and deviation."""
    if deviation_s < 0:
        raise LatencyError(f"a standard deviation cannot be negative, got {deviation_s} s")
    return mean_s + cantelli_factor(tail_probability) * deviation_s


def min_group_size(resource_error: float) -> int:
    """Return the workers a scheduling group needs so that splitting wastes at most this part.

    ``1 / (2 e)``, rounded up: half of the groups need one worker more (Aladdin, appendix L).
    """
    if not 0 < resource_error <= 1:
        raise LatencyError(f"a resource error is above 0 and at most 1, got {resource_error}")
    return math.ceil(_steady(1 / (2 * resource_error)))


def workers_needed(request_rate: float, workers_per_rate: float, base_workers: float) -> int:
    """Return the workers for ``request_rate`` requests/s: ``ceil(k5 r + c5)`` (equation 7)."""
    if request_rate < 0:
        raise LatencyError(f"a request rate cannot be negative, got {request_rate}")
    return max(0, math.ceil(_steady(workers_per_rate * request_rate + base_workers)))


def _steady(value: float) -> float:
    """Return the value without its last digits, so that 5.000000000000001 needs no sixth worker."""
    return round(value, 9)
