"""The bound on attainment: cases worked out on paper."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.sim.bound import attainment_bound
from gpupoold.sim.boxes import SimModel
from gpupoold.sim.workloads import SimRequest
from tests.sim.box import latency, models, request, simulate


def bound(requests: list[SimRequest], box: dict[str, SimModel], num_devices: int = 1) -> float:
    share = attainment_bound(requests, box, num_devices)
    assert share is not None
    return share


def box_of(names: str, ttft_s: float, tbt_s: float) -> dict[str, SimModel]:
    """Models that load in 1 s and decode in steps of 10 ms."""
    return models(names, targets=Targets(ttft_s, tbt_s), speed=latency(prefill_s=0.0))


def test_without_tokens_there_is_no_bound() -> None:
    assert attainment_bound([], {}, 1) is None


def test_an_easy_load_has_no_late_token() -> None:
    assert bound([request("a"), request("b", 3.0)], box_of("ab", 10.0, 0.1)) == 1.0


def test_a_first_token_needs_the_load_of_the_model_and_its_prefill() -> None:
    # The load takes 1 s, and the prefill of 5,000 tokens 0.5 s: token k comes 1.5 s + k * 10 ms
    # after the start at the earliest, and is due 1 s + k * 20 ms after it. So 50 are late.
    one = request("a", prompt_tokens=5000, output_tokens=100)
    assert bound([one], box_of("a", 1.0, 0.02)) == pytest.approx(0.5, abs=0.01)
    late = request("a", 5.0, prompt_tokens=5000, output_tokens=100)
    assert bound([late], box_of("a", 1.0, 0.02)) == 1.0  # loaded at 1 s


def test_tokens_that_are_due_faster_than_steps_become_late() -> None:
    # Token k comes 1.01 s + k * 10 ms after the start, and is due after 1.5 s + k * 5 ms.
    one = request("a", output_tokens=200)
    box = box_of("a", 1.5, 0.005)
    assert bound([one], box) == pytest.approx(0.5, abs=0.01)
    [result] = simulate([one], box).results
    in_time = sum(
        at_s <= box["a"].targets.deadline_s(0.0, k) for k, at_s in enumerate(result.token_times_s)
    )
    assert in_time / 200 == pytest.approx(bound([one], box), abs=0.01)


@pytest.mark.parametrize(("num_models", "expected"), [(2, 1.0), (3, 2 / 3), (4, 0.5)])
def test_models_that_need_more_than_the_device_lose_the_rest(
    num_models: int, expected: float
) -> None:
    """Each model needs half of the device: steps of 10 ms, a token due every 20 ms."""
    names = "abcd"[:num_models]
    requests = [request(name, output_tokens=10_000, prompt_tokens=1) for name in names]
    share = bound(requests, box_of(names, 1.2, 0.02))
    # The tokens that the device has room for are rounded up to a class of work, by up to 5 %.
    assert expected <= share <= min(1.0, 1.06 * expected)
    assert bound(requests, box_of(names, 1.2, 0.02), num_devices=2) == 1.0


def test_requests_of_a_model_can_share_steps() -> None:
    requests = [
        request("a", request_id=f"r{n}", output_tokens=5000, prompt_tokens=1) for n in range(8)
    ]
    assert bound(requests, box_of("a", 2.0, 0.011)) == 1.0


def test_prefills_that_come_too_fast_are_late() -> None:
    # Ten prompts of 1 s each arrive at once and are due after 5 s, of which the load takes none
    # because it may come before the arrival.
    requests = [
        request("a", 10.0, request_id=f"r{n}", prompt_tokens=10_000, output_tokens=1)
        for n in range(10)
    ]
    share = bound(requests, box_of("a", 5.0, 0.1))
    assert 0.5 <= share <= 0.55


def test_a_burst_loses_tokens_though_the_device_idles_before_and_after() -> None:
    quiet = [request("b", 20.0 * n, request_id=f"q{n}", output_tokens=1) for n in range(10)]
    burst = [
        request("a", 90.0, request_id=f"r{n}", prompt_tokens=10_000, output_tokens=1)
        for n in range(40)
    ]
    share = bound([*quiet, *burst], box_of("ab", 5.0, 0.1))
    # 10 in quiet, and 5 of the burst; a grid of 64 slots over 185 s rounds deadlines up.
    assert 15 / 50 <= share <= 20 / 50
