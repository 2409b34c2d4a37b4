"""Closed forms C1, C3, C10, C15, C16 and C20 exactly; C2 also by simulation."""

from __future__ import annotations

from collections import Counter

import pytest

from gpupoold.scheduling.policies.aegaeon import TurnLoad, round_quotas_s
from gpupoold.sim.clock import EventPriority, EventQueue
from gpupoold.sim.lengths import Lengths
from gpupoold.sim.workloads import equal_rates, model_names, poisson_workload
from tests.sim.closed_forms import (
    active_models_sd,
    active_share,
    expected_active_models,
    max_batches_at_attainment,
    max_equal_batches,
    min_idle_share,
    models_per_device,
    multiplexing_ceiling,
    request_level_models_per_gpu,
    saved_share,
)

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
    for request in poisson_workload(rates, duration_s, Lengths(1, 1), seed=11):
        arrival_s = request.arrival_s
        queue.schedule(arrival_s, (request.model, +1), EventPriority.ARRIVAL)
        queue.schedule(arrival_s + RESIDENCE_S, (request.model, -1), EventPriority.COMPLETION)
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


# Batches per device by tokens per target, for switches of 0, 0.25, 0.5 and 1 s; turns to 4 s.
SWITCHES_S = (0.0, 0.25, 0.5, 1.0)


@pytest.mark.parametrize(
    ("tokens_per_target", "expected"), [(4, (4.0, 3.76, 3.56, 3.2)), (10, (10.0, 9.41, 8.89, 8.0))]
)
def test_c10_capacity_law(tokens_per_target: int, expected: tuple[float, ...]) -> None:
    batches = [max_equal_batches(tokens_per_target, s, 4.0) for s in SWITCHES_S]
    assert tuple(round(num, 2) for num in batches) == expected


def test_c10_strict_targets_leave_less_than_two_batches() -> None:
    """Tokens due every 20 ms in steps of 10 ms: why Aegaeon's figure 13c is a loss."""
    assert round(max_equal_batches(0.02 / 0.01, 0.5, 4.0), 2) == 1.78


def test_c10_capacity_at_90_percent() -> None:
    most = max_equal_batches(4, 1.0, 4.0)
    assert max_batches_at_attainment(most, 0.9) == pytest.approx(3.2 / 0.9)
    assert max_batches_at_attainment(most, 1.0) == most


@pytest.mark.parametrize("switch_s", SWITCHES_S[1:])
@pytest.mark.parametrize("num_batches", [2, 3, 4, 5, 8])
def test_c10_is_what_the_quotas_give(switch_s: float, num_batches: int) -> None:
    """Share of tokens on time in a round of equal batches: 1 as far as the law says, then less."""
    load = TurnLoad(tbt_s=0.1, step_s=0.025)
    total_switch_s = num_batches * switch_s
    quotas_s = round_quotas_s([load] * num_batches, total_switch_s, 4.0)
    num_tokens = quotas_s[0] / load.step_s
    on_time = num_tokens * load.tbt_s / (sum(quotas_s) + total_switch_s)
    most = max_equal_batches(load.tokens_per_target, switch_s, 4.0)
    assert (on_time >= 1) is (num_batches <= most)
    if on_time < 1:
        assert max_batches_at_attainment(most, on_time) == pytest.approx(num_batches)


def test_c15_deployment_saving() -> None:
    """Aegaeon, section 7.5: 1192 devices became 213."""
    assert saved_share(1192, 213) == pytest.approx(0.8213, abs=5e-5)
    assert round(100 * saved_share(1192, 213), 1) == 82.1


def test_c16_multiplexing_ceiling() -> None:
    """Aegaeon, section 7.2: two models of up to 14B on a device of 80 GB, 16 devices, 32 models."""
    device_bytes, weight_bytes, kv_bytes = 80 * 10**9, 28 * 10**9, 8 * 10**9
    assert models_per_device(device_bytes, weight_bytes, kv_bytes) == 2
    assert multiplexing_ceiling(device_bytes, weight_bytes, kv_bytes, num_devices=16) == 32


def test_c16_a_model_larger_than_the_device() -> None:
    assert multiplexing_ceiling(10, 11, 0, 16) == 0
    assert models_per_device(10, 5, 0) == 2
    assert models_per_device(10, 5, 1) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: max_equal_batches(4, 1, 0),
        lambda: max_batches_at_attainment(4, 0),
        lambda: max_batches_at_attainment(4, 1.1),
        lambda: models_per_device(10, 0, 1),
        lambda: models_per_device(10, 1, -1),
    ],
)
def test_nonsense_is_named(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match=r".+"):
        call()
