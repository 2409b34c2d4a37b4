"""Live requests: deadlines, attainment, counts."""

from __future__ import annotations

import pytest

from gpupoold.control.live_requests import LiveRequest, LiveRequests
from gpupoold.domain import Targets
from tests.unit.control.live import live_request


def request(request_id: str = "r", model: str = "m", device: int = 0) -> LiveRequest:
    return live_request(
        request_id, model, arrival_s=100.0, targets=Targets(2.0, 0.5), device=device
    )


def test_before_its_first_token() -> None:
    live = request()
    assert live.next_deadline_s == 102.0
    assert live.ttft_s is None
    assert live.gaps_s == []
    assert live.num_in_time == 0


def test_tokens() -> None:
    live = request()
    live.add_tokens([7], 101.0)
    live.add_tokens([], 101.5)
    live.add_tokens([8, 9], 102.5)
    assert live.output_token_ids == [7, 8, 9]
    assert live.ttft_s == 1.0
    assert live.gaps_s == [1.5, 0.0]
    assert live.next_deadline_s == 102.0 + 3 * 0.5


def test_a_token_exactly_at_its_deadline_is_in_time() -> None:
    live = request()
    live.add_tokens([1], 102.0)
    assert live.num_in_time == 1


def test_a_late_token_does_not_move_later_deadlines() -> None:
    live = request()
    live.add_tokens([1], 102.75)  # due at 102.0: late
    live.add_tokens([2], 102.75)  # due at 102.5: late
    live.add_tokens([3], 102.75)  # due at 103.0
    live.add_tokens([4], 103.5)  # due at 103.5
    live.add_tokens([5], 104.25)  # due at 104.0: late
    assert live.num_in_time == 2


def test_a_buffer_of_early_tokens_pays_for_a_pause() -> None:
    live = request()
    live.add_tokens([1, 2, 3, 4], 101.0)
    live.add_tokens([5], 104.0)  # a pause of 3 s, six times the target between tokens
    assert live.num_in_time == 5


def test_requests_by_id_model_and_worker() -> None:
    live = LiveRequests()
    for number in range(4):
        live.add(request(f"r{number}", "ab"[number % 2], number // 2))
    assert len(live) == 4
    assert live.num_of("a") == live.num_of("b") == 2
    assert live.num_of("unknown") == 0
    assert [r.request_id for r in live.of_model("b")] == ["r1", "r3"]
    assert [r.request_id for r in live.on_device(1)] == ["r2", "r3"]
    assert [r.request_id for r in live.all()] == ["r0", "r1", "r2", "r3"]
    taken = live.pop("r1")
    assert taken is not None
    assert taken.request_id == "r1"
    assert live.pop("r1") is None
    assert live.get("r1") is None
    assert live.get("r3") is not None
    assert (len(live), live.num_of("b")) == (3, 1)


def test_ids_are_unique() -> None:
    live = LiveRequests()
    live.add(request())
    with pytest.raises(ValueError, match="has the id r"):
        live.add(request(model="n"))
    assert (len(live), live.num_of("n")) == (1, 0)


def test_bytes_per_key() -> None:
    live = LiveRequests()
    for number, key_id in enumerate(["k", "k", ""]):
        live.add(live_request(f"r{number}", key_id=key_id, num_bytes=10**number))
    assert (live.num_bytes, live.bytes_of_key("k"), live.bytes_of_key("")) == (111, 11, 100)
    live.pop("r1")
    live.pop("r1")
    assert (live.num_bytes, live.bytes_of_key("k")) == (101, 1)


def test_requests_of_an_adapter_are_those_of_its_model_under_another_name() -> None:
    live = LiveRequests()
    live.add(live_request("r", "m"))
    live.add(adapted := live_request("s", "m", served_name="adapter"))
    assert (live.num_of("m"), live.num_of("adapter")) == (2, 0)
    assert (live.num_of_name("m"), live.num_of_name("adapter")) == (1, 1)
    assert live.of_name("adapter") == [adapted]
    live.pop("s")
    assert (live.num_of("m"), live.num_of_name("adapter")) == (1, 0)
