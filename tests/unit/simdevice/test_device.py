"""Turns, steps and switches of a device without an engine, in synthetic time."""

from __future__ import annotations

import itertools
import math

import pytest

from gpupoold.domain import Targets
from gpupoold.sim.memory import PAGE_BYTES
from gpupoold.wire import messages as m
from tests.sim.box import GB
from tests.unit.simdevice.box import KV_BYTES, PREFILL_S, STEP_S, SWITCH_S, Box


def test_a_lone_request_takes_switch_prefill_and_steps() -> None:
    box = Box("a")
    box.ask("a", "r", max_tokens=4)
    box.turn("a")
    box.at(5.0)
    first_s = SWITCH_S + PREFILL_S
    assert box.token_times("r") == pytest.approx([first_s + k * STEP_S for k in range(4)])
    assert box.finish("r") == "length"
    assert box.ended() == [1]
    assert [output.step_s for output in box.outputs()] == [None, STEP_S, STEP_S, STEP_S]
    assert all(output.frames == [] for output in box.outputs())


def test_lateness_loses_no_token_and_puts_nothing_off() -> None:
    prompt, late = Box("a"), Box("a")
    for box in (prompt, late):
        box.ask("a", "r", max_tokens=200)
        box.turn("a")
    prompt.at(2.0)
    late.at(1.5)
    late.late(2.0)
    assert late.tokens("r") == prompt.tokens("r")
    [last] = late.outputs()[-1].progress
    assert len(last.new_token_ids) == 50
    late.at(9.0)
    prompt.at(9.0)
    assert late.token_times("r")[-1] == pytest.approx(prompt.token_times("r")[-1])
    assert len(late.tokens("r")) == 200


def test_one_message_never_has_steps_of_different_batches() -> None:
    box = Box("a")
    box.ask("a", "short", max_tokens=3)
    box.ask("a", "long", max_tokens=6)
    box.turn("a")
    box.late(9.0)
    counts = [[len(item.new_token_ids) for item in output.progress] for output in box.outputs()]
    assert counts == [[1], [1], [2, 2], [3]]
    assert box.finish("short") == box.finish("long") == "length"


def test_waiting_requests_are_prefilled_one_by_one_before_the_next_step() -> None:
    box = Box("a")
    box.ask("a", "one", max_tokens=50)
    box.turn("a")
    box.at(1.105)
    for name in ("two", "three"):
        box.ask("a", name, max_tokens=50)
    box.at(3.0)
    assert box.token_times("two")[0] == pytest.approx(1.11 + PREFILL_S)
    assert box.token_times("three")[0] == pytest.approx(1.11 + 2 * PREFILL_S)
    pairs = itertools.pairwise(box.token_times("one"))
    assert max(later - one for one, later in pairs) == pytest.approx(2 * PREFILL_S + STEP_S)


class TestTurns:
    def test_quota_ends_a_turn_only_for_another_model(self) -> None:
        box = Box("a")
        box.ask("a", "r", max_tokens=100)
        box.turn("a", quota_s=0.1)
        box.at(1.5)
        assert box.ended() == []
        box.turn("a", 0.1, then="a", turn_id=1)
        box.at(1.6)
        assert box.ended() == [1]
        assert box.token_times("r")[-1] == pytest.approx(1.5 + STEP_S, abs=STEP_S)

    def test_new_turn_does_something_however_short_its_quota(self) -> None:
        box = Box("a", "b")
        box.ask("a", "r", max_tokens=100)
        box.turn("a", quota_s=0.0, then="b")
        box.at(1.5)
        assert len(box.tokens("r")) == 1
        assert box.ended() == [1]

    def test_without_work_it_ends_at_once_and_nothing_moves(self) -> None:
        box = Box("a")
        box.turn("a")
        assert box.ended() == [1]
        assert box.of(m.Switched) == []
        box.turn("nobody")
        assert box.ended() == [1, 2]

    def test_longer_quota_for_the_turn_under_way(self) -> None:
        box = Box("a", "b")
        box.ask("a", "r", max_tokens=500)
        box.turn("a", quota_s=0.5, then="b")
        box.at(1.2)
        box.turn("a", quota_s=1.0, then="b", turn_id=1)
        box.at(1.9)
        assert box.ended() == []
        box.at(2.1)
        assert box.ended() == [1]

    def test_an_endless_turn_can_get_an_end(self) -> None:
        box = Box("a", "b")
        box.ask("a", "r", max_tokens=500)
        box.turn("a", quota_s=math.inf)
        box.at(1.9)
        box.turn("a", quota_s=1.0, then="b", turn_id=1)
        box.at(2.1)
        assert box.ended() == [1]
        assert box.token_times("r")[-1] == pytest.approx(2.0, abs=STEP_S)

    def test_another_turn_begins_after_the_step_in_progress(self) -> None:
        box = Box("a", "b")
        box.ask("a", "ra", max_tokens=500)
        box.ask("b", "rb", max_tokens=500)
        box.turn("a")
        box.at(1.505)
        box.turn("b")
        assert box.ended() == []
        box.at(2.6)
        assert box.ended() == [1]
        assert box.token_times("ra")[-1] == pytest.approx(1.51)
        assert box.token_times("rb")[0] == pytest.approx(1.51 + SWITCH_S + PREFILL_S)

    def test_no_turn_ends_the_one_under_way(self) -> None:
        box = Box("a")
        box.ask("a", "r", max_tokens=500)
        box.turn("a")
        box.at(1.5)
        box.turn(None)
        box.at(2.0)
        assert box.ended() == [1]
        assert box.device.next_due_s is None

    def test_orders_for_a_turn_that_has_ended_are_old_news(self) -> None:
        box = Box("a")
        box.ask("a", "r", max_tokens=1)
        box.turn("a")
        box.at(2.0)
        box.ask("a", "s", max_tokens=1)
        box.turn("a", then="a", turn_id=1)
        box.at(3.0)
        assert box.tokens("s") == []


def prefetch_and_turn(box: Box) -> tuple[int, float | None]:
    """What its status has of prefetched weights and of the turn."""
    return box.sim.memory.prefetched_bytes, box.sim.turn_began_s


class TestMemory:
    def test_the_next_model_comes_in_meanwhile_if_there_is_room(self) -> None:
        box = Box("a", "b")
        box.ask("a", "ra", max_tokens=300)
        box.ask("b", "rb", max_tokens=1)
        box.turn("a", quota_s=1.5, then="b")
        box.at(2.51)
        assert box.ended() == [1]
        box.turn("b")
        box.at(3.0)
        assert box.token_times("rb") == [pytest.approx(2.51 + PREFILL_S, abs=STEP_S)]
        second = box.of(m.Switched)[1].switch  # type: ignore[attr-defined]
        assert (second.model, second.previous) == ("b", "a")
        assert (second.weight_bytes, second.prefetched_bytes) == (0, 10 * GB)
        assert second.total_s == 0.0

    def test_prefetched_weights_are_reported_until_that_begins(self) -> None:
        box = Box("a", "b")
        box.ask("a", "ra", max_tokens=300)
        box.ask("b", "rb", max_tokens=1)
        box.turn("a", quota_s=1.5, then="b")
        assert prefetch_and_turn(box) == (0, None)
        box.at(1.2)
        assert prefetch_and_turn(box) == (10 * GB, 1.0)
        box.at(2.51)
        assert prefetch_and_turn(box) == (10 * GB, None)
        box.turn("b")
        assert box.sim.memory.prefetched_bytes == 0

    def test_turns_tell_when_they_began_and_ended(self) -> None:
        box = Box("a", "b")
        box.ask("a", "ra", max_tokens=10)
        box.turn("a")
        box.at(3.0)
        box.turn("b")
        first, second = [one for one in box.sent if isinstance(one, m.TurnReport)]
        assert (first.model, first.began_s) == ("a", 1.0)
        assert first.ended_s == pytest.approx(1.0 + PREFILL_S + 9 * STEP_S)
        assert (second.model, second.began_s) == ("b", None)

    @pytest.mark.parametrize(("kv_host_bytes", "num_dropped"), [(None, 0), (GB, 0), (0, 1)])
    def test_kv_beyond_host_memory_is_computed_anew(
        self, kv_host_bytes: int | None, num_dropped: int
    ) -> None:
        box = Box("a", "b", capacity_gb=10.02, kv_host_bytes=kv_host_bytes)
        box.ask("a", "ra", max_tokens=300)
        box.ask("b", "rb", max_tokens=10)
        box.turn("a", quota_s=2.0, then="b")
        box.at(3.1)
        assert box.ended() == [1]
        box.turn("b")
        box.at(5.0)
        box.turn("a")
        box.at(9.0)
        assert box.sim.memory.num_dropped == num_dropped
        assert len(box.tokens("ra")) == len(set(box.token_times("ra"))) == 300
        assert box.finish("ra") == box.finish("rb") == "length"
        box.sim.check_memory()

    def test_a_model_without_requests_is_taken_off(self) -> None:
        box = Box("a")
        box.ask("a", "ra", max_tokens=1)
        box.turn("a")
        box.at(3.0)
        free_bytes = box.sim.memory.free_bytes
        box.sim.page_out("a")
        assert box.sim.memory.free_bytes == free_bytes + 10 * GB
        assert box.sim.memory.resident == frozenset()
        assert box.of(m.MemoryReport)[-1].missing_bytes == {"a": 10 * GB}  # type: ignore[attr-defined]
        box.sim.page_out("a")
        assert box.sim.memory.free_bytes == free_bytes + 10 * GB

    def test_after_a_turn_the_next_model_waits_for_its_order(self) -> None:
        box = Box("a", "b", weight_gb=60)
        box.ask("a", "ra", max_tokens=100)
        box.ask("b", "rb", max_tokens=1)
        box.turn("a", quota_s=0.5, then="b")
        box.at(8.0)
        assert box.token_times("ra")[-1] < 7.0
        assert box.sim.memory.resident == {"a"}
        box.turn("b")
        box.at(20.0)
        # 20 GB had room beside the first model, 40 GB come after the order.
        slack_s = 0.002  # for the first model's KV: it keeps memory, or leaves first
        assert box.token_times("rb")[0] == pytest.approx(8.0 + 4.0 + PREFILL_S, abs=slack_s)
        assert box.sim.memory.resident == {"b"}

    def test_changes_are_reported_with_the_turn_or_without(self) -> None:
        box = Box("a", "b", weight_gb=60)
        box.ask("a", "ra", max_tokens=100)
        box.turn("a", quota_s=0.5, then="b")
        missing: dict[str, int] = {}
        for message in box.of(m.MemoryReport):
            missing |= message.missing_bytes  # type: ignore[attr-defined]
        assert missing == {"a": 0}
        box.at(7.0)
        ended = box.sent[-1]
        assert isinstance(ended, m.TurnReport)
        assert (ended.turn_id, ended.missing_bytes) == (1, {})

    def test_paused_kv_leaves_and_returns(self) -> None:
        box = Box("a", "b", weight_gb=60, capacity_gb=60.1)
        box.ask("a", "ra", max_tokens=100, prompt=1000)
        box.ask("b", "rb", max_tokens=2)
        box.turn("a", quota_s=0.145, then="b")
        box.at(7.0)
        box.turn("b", then="a")
        _, here_bytes, kv_out_bytes = box.sim.memory.held_bytes("a")
        assert here_bytes + kv_out_bytes == 1005 * KV_BYTES
        assert kv_out_bytes == PAGE_BYTES
        box.at(13.0)
        box.turn("a")
        box.at(30.0)
        first, second, third = (s.switch for s in box.of(m.Switched))  # type: ignore[attr-defined]
        assert (first.model, second.model, third.model) == ("a", "b", "a")
        assert (second.kv_in_bytes, third.kv_in_bytes) == (0, kv_out_bytes)
        assert len(box.tokens("ra")) == 100
        assert box.sim.memory.free_bytes == 100_000_000

    def test_targets_can_change(self) -> None:
        box = Box("a")
        box.sim.set_targets("a", Targets(1.0, 0.2))
        assert box.sim.models["a"].targets == Targets(1.0, 0.2)


class TestAborts:
    @pytest.mark.parametrize("at_s", [0.5, 1.01, 1.205, 1.3])
    def test_kv_is_free_and_no_token_comes_after(self, at_s: float) -> None:
        """While it waits for the switch, is prefilled, in a step, and between two."""
        box = Box("a")
        box.ask("a", "r", max_tokens=100)
        box.turn("a")
        box.at(at_s)
        before = len(box.tokens("r"))
        box.device.abort(["r", "unknown"])
        box.at(3.0)
        assert len(box.tokens("r")) == before
        assert box.sim.requests.all("a") == []
        assert box.sim.memory.held_bytes("a") == (10 * GB, 0, 0)
        assert box.ended() == [1]

    def test_others_of_the_batch_go_on(self) -> None:
        box = Box("a")
        box.ask("a", "gone", max_tokens=100)
        box.ask("a", "stays", max_tokens=100)
        box.turn("a")
        box.at(1.505)
        box.device.abort(["gone"])
        box.at(9.0)
        assert len(box.tokens("stays")) == 100
        assert box.finish("gone") is None

    def test_of_a_request_whose_kv_is_in_host_memory(self) -> None:
        box = Box("a", "b", weight_gb=60, capacity_gb=60.1)
        box.ask("a", "ra", max_tokens=100, prompt=1000)
        box.ask("b", "rb", max_tokens=200)
        box.turn("a", quota_s=0.145, then="b")
        box.at(7.5)
        box.turn("b")
        assert box.sim.memory.held_bytes("a")[2] > 0
        box.device.abort(["ra"])
        assert box.sim.memory.held_bytes("a") == (0, 0, 0)

    def test_removed_model_ends_its_turn_and_names_its_requests(self) -> None:
        box = Box("a", "b")
        box.ask("a", "one", max_tokens=100)
        box.ask("b", "other", max_tokens=1)
        box.turn("a")
        box.at(1.5)
        assert box.device.remove_model("a") == ["one"]
        box.at(1.6)
        assert box.ended() == [1]
        assert box.sim.memory.free_bytes == 80 * GB
        box.turn("b")
        box.at(9.0)
        assert len(box.tokens("other")) == 1


def test_deadlines_order_evictions() -> None:
    box = Box("a", "b", "c", capacity_gb=25)
    for name in ("a", "b"):
        box.ask(name, f"r{name}", max_tokens=5 if name == "a" else 500)
    box.turn("a")
    box.at(3.0)
    box.turn("b", quota_s=0.5, then="c")
    box.at(3.5)
    box.ask("c", "rc", max_tokens=5)
    box.at(9.0)
    box.turn("c")
    box.at(12.0)
    assert box.sim.memory.resident == {"b", "c"}, "a has no request left and goes first"
    assert math.isinf(box.sim.requests.use_of("a", box.sim.models["a"].targets)[1])
