"""Closed forms on top of latencies: slack, tail bounds and group sizes."""

from __future__ import annotations

import math

from gpupoold.latency.errors import LatencyError
from gpupoold.latency.models import LatencyModel


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


def group_throughput(
    latency: LatencyModel,
    num_gpus: int,
    room_bytes: int,
    kv_bytes_per_token: int,
    context_tokens: float,
    tbt_s: float,
) -> float:
    """Return the most tokens per second and GPU of a group of ``num_gpus`` (Aladdin, equation 6).

    ``latency`` holds for the group: its iteration time takes the place of equation 5, which
    interpolates between groups. ``room_bytes`` is the memory beside the weights, on all GPUs. The
    batch is as large as the KV of sequences of ``context_tokens`` allows, or as a step of ``tbt_s``
    allows; 0 if neither allows a sequence.
    """
    by_memory = room_bytes / max(1.0, context_tokens * kv_bytes_per_token)
    context = max(1, round(context_tokens))
    one_s = latency.decode_step_s(1, context)
    per_sequence_s = latency.decode_step_s(2, 2 * context) - one_s  # the laws are linear
    base_s = one_s - per_sequence_s
    by_target = (tbt_s - base_s) / max(per_sequence_s, 1e-9)
    if min(by_memory, by_target) < 1:
        return 0.0
    full_s = base_s + by_memory * per_sequence_s
    return min(by_memory / (num_gpus * full_s), by_target / (num_gpus * tbt_s))


def _steady(value: float) -> float:
    """Return the value without its last digits, so that 5.000000000000001 needs no sixth worker."""
    return round(value, 9)
