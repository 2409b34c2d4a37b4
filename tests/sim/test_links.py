"""One link each way per device: weights and KV wait for each other, but not for the other way."""

from __future__ import annotations

import pytest

from gpupoold.sim.memory import SimMemory
from tests.sim.box import GB, models, request, simulate

KV = 10_000_000  # bytes per token: a hundred tokens are 1 GB, a tenth of a second


def memory(device_gb: int = 80, names: str = "abc", weight_gb: float = 10) -> SimMemory:
    box = models(names, weight_gb, kv_bytes_per_token=KV)
    return SimMemory(device_gb * GB, box, lambda _: (1, 0.0))


def test_kv_comes_in_behind_weights() -> None:
    one = memory()
    assert one.switch_in("a", 0.0) == (1.0, 10 * GB)
    assert one.prefetch("b", "a", 1.0) == 10 * GB  # until 2
    one.receive_kv("a", 100)
    ready_in_s, moved_bytes = one.switch_in("a", 1.5, is_on_turn=True)
    assert ready_in_s == pytest.approx(2.1 - 1.5)
    assert moved_bytes == GB


def test_weights_come_in_behind_kv() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    one.receive_kv("a", 500)
    ready_in_s, moved_bytes = one.switch_in("a", 1.0)
    assert ready_in_s == pytest.approx(0.5)
    assert moved_bytes == 5 * GB
    ready_in_s, moved_bytes = one.switch_in("b", 1.2)
    assert ready_in_s == pytest.approx(1.5 + 1.0 - 1.2)
    assert moved_bytes == 10 * GB


def test_copies_out_wait_for_each_other() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    one.add_kv("a", 300)
    assert one.send_kv("a", 100, 5.0) == pytest.approx(5.1)
    assert one.send_kv("a", 200, 5.0) == pytest.approx(5.3)


def test_the_two_ways_do_not_wait_for_each_other() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    one.add_kv("a", 1000)
    one.prefetch("b", "a", 1.0)
    assert one.send_kv("a", 1000, 1.0) == pytest.approx(2.0)
    ready_in_s, moved_bytes = one.switch_in("c", 1.0)
    assert ready_in_s == pytest.approx(1.0, abs=0.06), "behind the queued pages of b"
    assert moved_bytes == 10 * GB


def test_weights_that_make_room_are_dropped_and_cost_nothing() -> None:
    one = memory(device_gb=15)
    one.switch_in("a", 0.0)
    one.add_kv("a", 400)
    ready_in_s, moved_bytes = one.switch_in("b", 10.0)
    assert ready_in_s == pytest.approx(1.0)
    assert moved_bytes == 10 * GB
    assert one.resident == {"b"}


def test_kv_that_makes_room_is_out_before_the_next_comes_in() -> None:
    """Weights are evicted first, because KV alone is too little; 2 GB of KV make the rest."""
    one = memory(device_gb=15)
    one.switch_in("a", 0.0)
    one.add_kv("a", 400)
    one.receive_kv("b", 300)
    ready_in_s, moved_bytes = one.switch_in("b", 10.0)
    assert ready_in_s == pytest.approx(0.2 + 1.3, rel=1e-3)
    assert moved_bytes == pytest.approx((2 + 13) * GB, rel=1e-3)


def test_a_migrate_waits_for_a_prefetch_on_the_same_link() -> None:
    """Two requests of a; while the second travels, b's weights are on their way in."""

    def second_token_s(with_rival: bool) -> float:
        requests = [request("a", request_id="first", output_tokens=3000)]
        if with_rival:
            requests.append(request("b", 3.0, prompt_tokens=10, output_tokens=500))
        requests.append(request("a", 3.0, request_id="second", output_tokens=500))
        box = models("ab", 10, kv_bytes_per_token=KV)
        outcome = simulate(requests, box, "aegaeon", num_devices=2)
        return outcome.results[-1].token_times_s[1]

    assert second_token_s(with_rival=True) > second_token_s(with_rival=False) + 0.3
