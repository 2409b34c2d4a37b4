"""Summaries of measurements with their limits. Pure.

Percentiles include all samples, because users see slow operations too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gpupoold.stats.histogram import percentile

RESIDENT_P99_S = 0.002
PREFETCHED_P50_S = 0.005
HOST_CACHED_SHARE = 0.9
HOST_CACHED_EXTRA_S = 0.010
KV_SWAP_SHARE = 0.8


def times(samples_s: Sequence[float]) -> dict[str, Any]:
    """Return median, 99th percentile and number of at least one duration."""
    return {"p50_s": p50(samples_s), "p99_s": p99(samples_s), "samples": len(samples_s)}


def p50(samples: Sequence[float]) -> float:
    """Return the median of at least one sample (nearest rank)."""
    return _percentile(samples, 0.5)


def p99(samples: Sequence[float]) -> float:
    """Return the 99th percentile of at least one sample (nearest rank)."""
    return _percentile(samples, 0.99)


def bandwidth(num_bytes: int, samples_s: Sequence[float]) -> float:
    """Return the bytes per second of a copy of ``num_bytes`` in its median time."""
    return num_bytes / p50(samples_s)


def at_most(measured_s: float, limit_s: float, of: str) -> dict[str, Any]:
    """Return the verdict on a duration with the name ``of``."""
    return {
        "limit_s": limit_s,
        "limit_of": of,
        "ratio": measured_s / limit_s,
        "reached": measured_s <= limit_s,
    }


def at_least(measured: float, limit: float, unit: str) -> dict[str, Any]:
    """Return the verdict on a rate in ``unit``."""
    return {f"limit_{unit}": limit, "ratio": measured / limit, "reached": measured >= limit}


def host_cached_limit_s(
    weight_bytes: int, kv_bytes: int, copy_bytes_per_s: float, memcpy_bytes_per_s: float
) -> float:
    """Return the limit of a switch that copies weights in, and KV both ways.

    Weights count at a share of the device's copy rate, KV at a share of ``memcpy``'s rate or a
    GPU's equivalent.
    """
    weights_s = weight_bytes / (HOST_CACHED_SHARE * copy_bytes_per_s)
    return weights_s + kv_bytes / (KV_SWAP_SHARE * memcpy_bytes_per_s) + HOST_CACHED_EXTRA_S


def hidden_share(extra_s: float, alone_s: float) -> float:
    """Return the share of a transfer's time that engines did not wait for; 1 means no cost.

    ``extra_s`` is the total slowdown of the steps, ``alone_s`` the positive time of the transfer
    when waited for.
    """
    return min(1.0, 1.0 - extra_s / alone_s)


def _percentile(samples: Sequence[float], fraction: float) -> float:
    value = percentile(samples, fraction)
    if value is None:
        raise ValueError("no samples for a percentile")
    return value
