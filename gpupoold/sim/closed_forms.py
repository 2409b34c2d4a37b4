"""Results that need no simulation, to check simulations against and for first estimates."""

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
    """Standard deviation of the number of active models, which is binomial."""
    share = active_share(rate_rps, residence_s)
    return math.sqrt(num_models * share * (1 - share))


def request_level_models_per_gpu(num_models: int, num_active: float) -> float:
    """Models per GPU at best, if a GPU keeps a model as long as it has requests in flight."""
    return num_models / num_active


def min_idle_share(gaps_per_hour: float, min_gap_s: float) -> float:
    """Share of time a model is idle at the least, with so many gaps of at least that length."""
    return gaps_per_hour * min_gap_s / 3600
