"""Closed-form results, for checks of simulations and for first estimates."""

from __future__ import annotations

import math


def active_share(rate_rps: float, residence_s: float) -> float:
    """Probability that a model has a request in flight at a random time.

    Arrivals are Poisson at ``rate_rps``, each request stays ``residence_s``.
    """
    return -math.expm1(-rate_rps * residence_s)


def expected_active_models(num_models: int, rate_rps: float, residence_s: float) -> float:
    """``E[m] = M (1 - e^(-lambda T))``: the mean number of models with a request in flight.

    All models have the same rate (Aegaeon, equation 1).
    """
    return num_models * active_share(rate_rps, residence_s)


def active_models_sd(num_models: int, rate_rps: float, residence_s: float) -> float:
    """Return the standard deviation of the number of active models, a binomial variable."""
    share = active_share(rate_rps, residence_s)
    return math.sqrt(num_models * share * (1 - share))


def request_level_models_per_gpu(num_models: int, num_active: float) -> float:
    """Models per GPU at best, if a GPU keeps a model as long as it has requests in flight."""
    return num_models / num_active


def min_idle_share(gaps_per_hour: float, min_gap_s: float) -> float:
    """Return the least share of time a model is idle, with that many gaps of at least that
    length.
    """
    return gaps_per_hour * min_gap_s / 3600


def max_equal_batches(tokens_per_target: float, switch_s: float, quota_max_s: float) -> float:
    """Return the batches that one decode device keeps on time: ``k <= n / (1 + s / Q_MAX)``.

    Equal batches of ``n = d / t`` steps per token target, ``switch_s`` per switch. Follows from
    equations 2 and 3 of Aegaeon with ``c = k s``: for more batches, alpha is above 1 and the share
    ``1 / alpha`` of tokens is on time. Not rounded; raises ValueError for a quota that is not above
    0.
    """
    if not quota_max_s > 0:
        raise ValueError(f"the longest turn must be above 0 s, got {quota_max_s}")
    return tokens_per_target / (1 + switch_s / quota_max_s)


def max_batches_at_attainment(max_batches: float, attainment: float) -> float:
    """Batches if only this share of tokens must be on time, above 0 and at most 1."""
    if not 0 < attainment <= 1:
        raise ValueError(f"an attainment is above 0 and at most 1, got {attainment}")
    return max_batches / attainment


def saved_share(num_before: float, num_after: float) -> float:
    """Share of devices no longer needed: ``1 - after / before``."""
    return 1 - num_after / num_before


def models_per_device(device_bytes: int, weight_bytes: int, kv_bytes: int) -> int:
    """Return the number of equal models that stay on one device, each with ``kv_bytes``.

    Raises ValueError for a model without bytes.
    """
    if weight_bytes < 1 or kv_bytes < 0:
        raise ValueError(f"a model has weights and KV >= 0, got {weight_bytes} and {kv_bytes} B")
    return device_bytes // (weight_bytes + kv_bytes)


def multiplexing_ceiling(
    device_bytes: int, weight_bytes: int, kv_bytes: int, num_devices: int
) -> int:
    """Return the largest number of models served without switching: all weights stay resident.

    The intrinsic limit of multiplexing (Aegaeon, section 7.2), at any rate.
    """
    return models_per_device(device_bytes, weight_bytes, kv_bytes) * num_devices
