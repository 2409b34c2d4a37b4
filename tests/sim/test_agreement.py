"""The simulator agrees with what can be worked out on paper."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.sim.engine import SimOutcome
from gpupoold.sim.metrics import summarise
from gpupoold.sim.policies import POLICY_NAMES
from gpupoold.sim.workloads import SimRequest
from tests.sim.box import latency, models, request, simulate
from tests.sim.closed_forms import max_equal_batches

every_policy = pytest.mark.parametrize("policy", POLICY_NAMES)


@every_policy
def test_a_lone_request_takes_switch_prefill_and_steps(policy: str) -> None:
    outcome = simulate([request("a", 1.0, output_tokens=500)], models("a"), policy)
    first_s = 1.0 + 1.0 + 0.02  # arrival, 10 GB at 10 GB/s, 100 tokens
    expected_s = [first_s + 0.01 * step for step in range(500)]
    assert outcome.results[0].token_times_s == pytest.approx(expected_s)
    [device] = outcome.devices
    assert (device.turns, device.switches, device.moved_bytes) == (1, 0, 10**10)
    assert (device.switch_s, device.busy_s) == pytest.approx((1.0, 0.02 + 499 * 0.01))


@every_policy
def test_requests_one_after_another_find_the_model_resident(policy: str) -> None:
    requests = [request("a", 10.0 * n, request_id=f"r{n}", output_tokens=20) for n in range(5)]
    outcome = simulate(requests, models("a"), policy)
    for number, result in enumerate(outcome.results):
        switch_s = 0.0 if number else 1.0
        first_s = 10.0 * number + switch_s + 0.02
        assert result.token_times_s == pytest.approx([first_s + 0.01 * k for k in range(20)])
    assert outcome.devices[0].moved_bytes == 10**10  # loaded once


@every_policy
def test_a_switching_overhead_is_paid_once_per_load(policy: str) -> None:
    requests = [request("a", 10.0 * n, request_id=f"r{n}") for n in range(2)]
    outcome = simulate(requests, models("a"), policy, switch_overhead_s=3.0)
    assert outcome.results[0].token_times_s[0] == pytest.approx(4.02)
    assert outcome.results[1].token_times_s[0] == pytest.approx(10.02)


def test_a_migrated_request_pays_for_its_kv_twice() -> None:
    """Out of the prefill device and into the other, with the weights."""
    box = models("a", kv_bytes_per_token=10**7)
    [result] = simulate([request("a")], box, "aegaeon", num_devices=2).results
    first_s = 1.0 + 0.02
    kv_s = 101 * 1e7 / 1e10
    assert result.token_times_s[0] == pytest.approx(first_s)
    assert result.token_times_s[1] == pytest.approx(first_s + kv_s + (1.0 + kv_s) + 0.01)


# Ten tokens a second are due; four batches' steps fill a device, one switch takes a second.
STEP_S, QUOTA_MAX_S, SWITCH_S = 0.025, 4.0, 1.0


def token_rates(num_models: int, device_gb: float, end_s: float = 400.0) -> list[float]:
    """Tokens per second of equal, endless batches that share one decode device."""
    names = [f"m{number}" for number in range(num_models)]
    box = models(
        names,
        kv_bytes_per_token=0,
        targets=Targets(100.0, 0.1),
        speed=latency(STEP_S, prefill_s=0.0),
    )
    requests = [request(name, prompt_tokens=0, output_tokens=100_000) for name in names]
    outcome = simulate(requests, box, "aegaeon", num_devices=2, device_gb=device_gb, end_s=end_s)
    warm_s = 100.0
    return [
        sum(at_s > warm_s for at_s in result.token_times_s) / (end_s - warm_s)
        for result in outcome.results
    ]


@pytest.mark.parametrize("num_models", [2, 3, 4, 5])
def test_c10_capacity_law(num_models: int) -> None:
    """As many batches keep their pace as the law says; more get a share of ``1 / alpha``.

    The device has room for one model, so that no switch is hidden.
    """
    rates = token_rates(num_models, device_gb=15)
    most = max_equal_batches(0.1 / STEP_S, SWITCH_S, QUOTA_MAX_S)
    assert most == pytest.approx(3.2)
    share = min(rates) / 10.0
    assert (share >= 1.0) is (num_models <= most)
    if num_models > most:
        assert share == pytest.approx(most / num_models, rel=0.1)
    assert max(rates) - min(rates) <= 0.1 * max(rates)


def test_c10_without_switches_the_device_is_full_at_four() -> None:
    """All stay resident: ``k <= n``."""
    assert min(token_rates(4, device_gb=80)) == pytest.approx(10.0, rel=0.03)
    assert min(token_rates(5, device_gb=80)) == pytest.approx(8.0, rel=0.02)


def rounds(
    device_gb: float, bandwidth_gb_per_s: float = 10, *, prefetches: bool = True
) -> tuple[float, int]:
    """Seconds waited for switches after the first three, and switches, of three models in turn."""
    box = models(
        "abc", 30, kv_bytes_per_token=0, speed=latency(bandwidth_gb_per_s=bandwidth_gb_per_s)
    )
    requests = [request(name, prompt_tokens=0, output_tokens=50_000) for name in "abc"]

    def decode_device(end_s: float) -> tuple[float, int]:
        outcome = simulate(
            requests,
            box,
            "aegaeon",
            num_devices=2,
            device_gb=device_gb,
            end_s=end_s,
            prefetches=prefetches,
        )
        device = outcome.devices[1]
        return device.switch_s, device.turns

    warm_s, warm_turns = decode_device(100.0)
    total_s, turns = decode_device(300.0)
    return total_s - warm_s, turns - warm_turns


def test_prefetching_hides_the_copy_when_there_is_room() -> None:
    waited_s, turns = rounds(device_gb=80)  # 3 s of copying during turns of 4 s
    assert turns >= 45
    assert waited_s == pytest.approx(0.0)


def test_prefetching_hides_of_a_copy_what_the_turn_is_long() -> None:
    """Two of three models fit, and 2 GB of the third."""
    waited_s, turns = rounds(device_gb=62, bandwidth_gb_per_s=4)  # 28 GB during turns of 4 s
    assert waited_s / turns == pytest.approx(28 / 4 - 4.0, rel=0.05)


def test_without_room_for_two_what_is_free_beside_a_model_is_prefetched() -> None:
    waited_s, turns = rounds(device_gb=50)
    assert waited_s / turns == pytest.approx((30 - 20) / 10, rel=0.05)


def test_without_prefetching_what_is_missing_is_waited_for() -> None:
    """Two of three models stay resident, and two thirds of the third."""
    waited_s, turns = rounds(device_gb=80, prefetches=False)
    assert waited_s / turns == pytest.approx(2 / 3 * (30 - 20) / 10, rel=0.05)


def overloaded(policy: str, end_s: float) -> tuple[list[SimRequest], SimOutcome]:
    """Twenty times what a device can do."""
    requests = [
        request("abcd"[n % 4], 0.05 * n, request_id=f"r{n}", output_tokens=400) for n in range(400)
    ]
    box = models("abcd", 15, speed=latency(0.01, sequence_s=0.02))
    return requests, simulate(requests, box, policy, end_s=end_s)


@every_policy
def test_in_overload_no_token_is_forgotten(policy: str) -> None:
    """What was due and never came counts as missed: nothing is dropped from the report."""
    end_s = 120.0  # all tokens are due by 20 + 10 + 40 s
    requests, outcome = overloaded(policy, end_s)
    summary = summarise(outcome.results, end_s).overall
    assert summary.num_requests == len(requests)
    assert summary.tokens.num_due == sum(one.output_tokens for one in requests)
    assert summary.num_tokens < summary.tokens.num_due
    in_time = sum(
        at_s <= result.targets.deadline_s(result.request.arrival_s, index)
        for result in outcome.results
        for index, at_s in enumerate(result.token_times_s)
    )
    assert summary.attainment == in_time / summary.tokens.num_due < 1


@every_policy
def test_in_overload_every_request_is_served_in_the_end(policy: str) -> None:
    requests, outcome = overloaded(policy, 50_000.0)
    for result, one in zip(outcome.results, requests, strict=True):
        assert result.request is one
        result.check(50_000.0)
        assert result.is_finished
