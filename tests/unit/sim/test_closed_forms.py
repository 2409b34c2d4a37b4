"""Closed forms C1, C3 and C20 exactly; C2 also by simulation."""

from __future__ import annotations

from collections import Counter

import pytest

from gpupoold.sim.clock import EventQueue, Priority
from gpupoold.sim.closed_forms import (
    active_models_sd,
    active_share,
    expected_active_models,
    min_idle_share,
    request_level_models_per_gpu,
)
from gpupoold.sim.lengths import LengthSampler
from gpupoold.sim.workloads import equal_rates, model_names, poisson_workload

# The paper's marketplace: models, requests per second of each, seconds a request stays.
NUM_MODELS, RATE_RPS, RESIDENCE_S = 100, 0.037, 16.79


def test_c1_expected_active_models() -> None:
    assert expected_active_models(NUM_MODELS, RATE_RPS, RESIDENCE_S) == pytest.approx(
        46.2717, abs=5e-5
    )
    # The paper prints 46.55, from a rate that it prints rounded to 0.037.
    assert expected_active_models(NUM_MODELS, 0.0373, RESIDENCE_S) == pytest.approx(
        46.5416, abs=5e-5
    )
    assert expected_active_models(NUM_MODELS, RATE_RPS, RESIDENCE_S) == pytest.approx(
        46.55, abs=0.3
    )


def test_c1_limits() -> None:
    assert expected_active_models(10, 0.0, 5.0) == 0
    assert expected_active_models(10, 1e9, 5.0) == 10
    assert active_share(1e-12, 1e-3) == pytest.approx(1e-15, rel=1e-9)


def test_c2_standard_deviation_of_active_models() -> None:
    assert active_models_sd(NUM_MODELS, RATE_RPS, RESIDENCE_S) == pytest.approx(4.99, abs=0.005)


def test_c2_active_models_by_simulation() -> None:
    """Mean and spread over time agree with the binomial law; mean within three errors."""
    mean, sd = simulated_active_models(duration_s=20_000.0)
    assert mean == pytest.approx(46.27, abs=0.5)
    assert sd == pytest.approx(4.99, abs=0.35)


def simulated_active_models(duration_s: float) -> tuple[float, float]:
    """Time average and deviation of the number of models with a request in flight."""
    rates = equal_rates(model_names(NUM_MODELS), RATE_RPS)
    queue: EventQueue[tuple[str, int]] = EventQueue()
    for request in poisson_workload(rates, duration_s, LengthSampler([(1, 1)]), seed=11):
        arrival_s = request.arrival_s
        queue.schedule(arrival_s, (request.model, +1), Priority.ARRIVAL)
        queue.schedule(arrival_s + RESIDENCE_S, (request.model, -1), Priority.COMPLETION)
    in_flight: Counter[str] = Counter()
    num_active, since_s = 0, 10 * RESIDENCE_S  # what comes before is the way there
    total = total_s = square = 0.0
    while (popped := queue.pop()) is not None and popped.at_s < duration_s:
        if popped.at_s > since_s:
            step_s, since_s = popped.at_s - since_s, popped.at_s
            total += num_active * step_s
            square += num_active**2 * step_s
            total_s += step_s
        model, change = popped.event
        before = in_flight[model] > 0
        in_flight[model] += change
        num_active += (in_flight[model] > 0) - before
    mean = total / total_s
    return mean, (square / total_s - mean**2) ** 0.5


def test_c3_request_level_pooling_stays_below_three_models_per_gpu() -> None:
    assert request_level_models_per_gpu(100, 46.55) == pytest.approx(2.148, abs=5e-4)
    assert request_level_models_per_gpu(100, 46.55) < 3


def test_c20_idle_share() -> None:
    assert min_idle_share(100, 10.0) == pytest.approx(0.278, abs=5e-4)
