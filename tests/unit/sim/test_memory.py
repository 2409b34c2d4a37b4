"""A simulated device's memory: what is where, and what a switch moves."""

from __future__ import annotations

import pytest

from gpupoold.sim.memory import PAGE_BYTES, SimMemory
from tests.sim.box import GB, models

KV = 10_000_000  # bytes per token: a hundred tokens are 1 GB


class Use:
    """Live requests and next deadlines by model; without a word, one that is due at 0."""

    def __init__(self) -> None:
        self.by_model: dict[str, tuple[int, float]] = {}

    def __call__(self, name: str) -> tuple[int, float]:
        return self.by_model.get(name, (1, 0.0))


def memory(
    device_gb: int = 80, weight_gb: float = 30, overhead_s: float = 0.0, use: Use | None = None
) -> SimMemory:
    box = models("abcd", weight_gb, kv_bytes_per_token=KV)
    return SimMemory(device_gb * GB, box, use or Use(), overhead_s)


def test_a_model_comes_in_once() -> None:
    one = memory()
    assert one.missing_bytes("a") == 30 * GB
    assert one.switch_in("a", 0.0) == (3.0, 30 * GB)
    assert one.missing_bytes("a") == 0
    assert one.switch_in("a", 9.0) == (0.0, 0)
    assert one.resident == {"a"}


def test_changes_are_reported_once_and_in_order() -> None:
    one = memory()
    one.switch_in("b", 0.0)
    one.switch_in("a", 3.0)
    assert one.take_changes() == (("a", 0), ("b", 0))
    assert one.take_changes() == ()
    one.switch_in("c", 6.0)
    changes = dict(one.take_changes())
    assert changes.pop("c") == 0
    [missing] = changes.values()
    assert 10 * GB <= missing < 10 * GB + PAGE_BYTES, "no more than needed is evicted"


def test_idle_models_go_first_and_the_least_recently_used_of_them() -> None:
    use = Use()
    one = memory(use=use)
    one.switch_in("a", 0.0)
    one.switch_in("b", 5.0)
    use.by_model = {"a": (0, float("inf")), "b": (0, float("inf"))}
    one.switch_in("c", 10.0)
    assert one.resident == {"b", "c"}
    use.by_model["b"] = (1, 0.0)
    use.by_model["c"] = (0, float("inf"))
    one.switch_in("d", 15.0)
    assert one.resident == {"b", "d"}


def test_of_paused_models_the_one_that_is_due_last_goes() -> None:
    use = Use()
    use.by_model = {"a": (1, 50.0), "b": (1, 20.0)}
    one = memory(use=use)
    one.switch_in("a", 0.0)
    one.switch_in("b", 5.0)
    one.switch_in("c", 10.0)
    assert one.resident == {"b", "c"}


def test_kv_that_moved_out_comes_back_with_the_switch() -> None:
    use = Use()
    use.by_model = {"a": (1, 99.0)}
    one = memory(device_gb=62, use=use)
    one.switch_in("a", 0.0)
    one.add_kv("a", 200)
    one.switch_in("b", 10.0)  # fits beside it, just so
    one.receive_kv("b", 100)
    ready_in_s, moved_bytes = one.switch_in("b", 20.0)
    assert ready_in_s == pytest.approx(0.1 + 0.1, abs=0.001)
    assert GB + GB <= moved_bytes < 2 * GB + PAGE_BYTES
    assert GB <= one.missing_bytes("a") < GB + PAGE_BYTES, "a page's worth of KV, no weights"
    one.add_kv("b", -100)
    assert one.switch_in("a", 30.0)[1] >= GB
    assert one.missing_bytes("a") == 0


def test_a_prefetch_is_waited_for_only_as_long_as_it_takes() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    assert one.prefetch("b", "a", 3.0) == 30 * GB
    assert one.prefetch("b", "a", 4.0) == 0
    ready_in_s, moved_bytes = one.switch_in("b", 4.0)
    assert ready_in_s == pytest.approx(2.0)
    assert moved_bytes == 0
    assert one.switch_in("b", 7.0) == (0.0, 0)


def test_a_prefetch_ends_when_another_model_is_next() -> None:
    """After a third of the copy; half a gigabyte is queued and still arrives."""
    one = memory(device_gb=130)
    one.switch_in("a", 0.0)
    one.take_moved("a")
    assert one.prefetch("b", "a", 3.0) == 30 * GB
    assert one.prefetch("c", "a", 4.0) == 30 * GB
    given_up = one.take_given_up()
    assert 19 * GB < given_up < 20 * GB
    assert (one.missing_bytes("b"), one.prefetched_bytes) == (given_up, 60 * GB - given_up)
    delay_s, moved = one.switch_in("c", 5.0)
    assert moved == 0
    assert delay_s == pytest.approx(2.0 + 0.1 * (20 - given_up / GB))
    assert one.take_given_up() == 0, "the copy goes on for its own switch"


def test_a_switch_does_not_wait_for_the_prefetch_of_another_model() -> None:
    one = memory(device_gb=130)
    one.switch_in("a", 0.0)
    one.prefetch("b", "a", 3.0)
    delay_s, moved = one.switch_in("c", 3.0)
    assert moved == 30 * GB
    assert delay_s == pytest.approx(3.0, abs=0.1)
    assert one.free_bytes == 130 * GB - 90 * GB + one.missing_bytes("b")


def test_a_prefetch_takes_what_is_free_beside_the_model_on_its_turn() -> None:
    one = memory(device_gb=50)
    one.switch_in("a", 0.0)
    assert one.prefetch("b", "a", 3.0) == 20 * GB
    assert one.prefetch("b", "a", 4.0) == 0
    assert one.resident == {"a"}
    assert one.missing_bytes("b") == 10 * GB
    one.take_moved("a")
    assert one.prefetched_bytes == 20 * GB
    ready_in_s, moved_bytes = one.switch_in("b", 6.0)
    assert ready_in_s == pytest.approx(1.0)
    assert moved_bytes == 10 * GB


def test_a_prefetch_leaves_memory_for_the_growth_of_the_present_kv() -> None:
    one = memory(device_gb=50)
    one.switch_in("a", 0.0)
    one.add_kv("a", 800)
    assert one.prefetch("b", "a", 3.0) == 10 * GB


def test_a_prefetch_makes_room_if_there_is_enough() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    one.switch_in("b", 3.0)
    assert one.prefetch("c", "b", 6.0) == 30 * GB
    assert one.resident == {"b", "c"}


def test_a_prefetch_evicts_idle_models_and_no_page_of_the_present_one() -> None:
    box = models("ab", 45, kv_bytes_per_token=KV) | models("c", 5, kv_bytes_per_token=KV)
    use = Use()
    use.by_model = {"c": (0, float("inf"))}
    one = SimMemory(80 * GB, box, use)
    one.switch_in("c", 0.0)
    one.switch_in("a", 1.0)
    assert one.prefetch("b", "a", 10.0) == 35 * GB
    assert one.resident == {"a"}
    assert one.held_bytes("c")[0] == 0


def test_the_overhead_is_for_weights_only() -> None:
    one = memory(overhead_s=2.0)
    assert one.switch_in("a", 0.0) == (5.0, 30 * GB)
    one.receive_kv("a", 100)
    ready_in_s, moved_bytes = one.switch_in("a", 5.0)
    assert ready_in_s == pytest.approx(0.1)
    assert moved_bytes == GB
    one.prefetch("b", "a", 10.0)
    ready_in_s, moved_bytes = one.switch_in("b", 10.0)
    assert ready_in_s == pytest.approx(5.0)
    assert moved_bytes == 0


def test_ended_requests_give_their_kv_back() -> None:
    one = memory(device_gb=31)
    one.switch_in("a", 0.0)
    one.add_kv("a", 100)
    one.add_kv("a", -100)
    one.add_kv("a", 100)
    assert one.switch_in("a", 5.0) == (0.0, 0)


def test_kv_grows_over_others() -> None:
    one = memory(device_gb=60)
    one.switch_in("a", 0.0)
    one.switch_in("b", 3.0)
    one.take_changes()
    one.add_kv("b", 100)
    assert one.resident == {"b"}
    [(name, missing)] = one.take_changes()
    assert name == "a"
    assert GB <= missing < GB + PAGE_BYTES


def test_far_weights_take_longer() -> None:
    box = models("ab", 30, kv_bytes_per_token=KV)
    one = SimMemory(80 * GB, box, Use(), far_shares={"b": 0.5})
    assert one.switch_in("a", 0.0) == (3.0, 30 * GB)
    assert one.switch_in("b", 3.0) == (6.0, 30 * GB)
    one.add_kv("b", 100)
    one.evict_weights("b", 10 * GB)
    assert one.prefetch("b", "a", 20.0) == pytest.approx(10 * GB, rel=0.01)
    assert one.switch_in("b", 20.0)[0] == pytest.approx(2.0, rel=0.01)


def test_weights_without_an_engine_stay_until_pages_are_needed() -> None:
    one = memory()
    one.switch_in("a", 0.0)
    one.unbind("a")
    assert one.missing_bytes("a") == 30 * GB
    one.bind("a")
    assert one.switch_in("a", 9.0) == (0.0, 0)
    one.unbind("a")
    one.switch_in("b", 10.0)
    one.add_kv("b", 3000)  # 30 of the 50 GB that are left, 10 of which had a's weights
    one.check({"a": 0, "b": 3000})
    one.bind("a")
    assert one.missing_bytes("a") == 10 * GB
