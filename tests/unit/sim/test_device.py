"""One simulated device by itself: turns, pieces of work, and when they are cut."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import Turn
from gpupoold.sim.clock import EventQueue
from gpupoold.sim.device import BoxDevice, SimDevice
from gpupoold.sim.live import SimLive
from tests.sim.box import GB, models, request

KV = 10_000_000


class Bench:
    """A device, its clock, and all that it has reported."""

    def __init__(self, device_gb: int = 80, prefetches: bool = True) -> None:
        box = models("abc", 10, kv_bytes_per_token=KV)
        self.queue: EventQueue[Callable[[], None]] = EventQueue()
        self.reported: list[tuple[float, e.Event]] = []
        device = BoxDevice(device_gb * GB, box, prefetches=prefetches)
        self.device = SimDevice(0, device, self.queue, self.record)

    def record(self, event: e.Event) -> None:
        self.reported.append((self.queue.now_s, event))

    def run(self, until_s: float = math.inf) -> None:
        while (at_s := self.queue.next_at_s) is not None and at_s <= until_s:
            due = self.queue.pop()
            assert due is not None
            due.event()

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self.queue.schedule(at_s, what)

    def add(self, model: str, name: str = "r", output_tokens: int = 11) -> SimLive:
        live = SimLive(request(model, request_id=name, output_tokens=output_tokens))
        self.device.add(live)
        return live

    def release(self, live: SimLive) -> None:
        self.device.release(live)

    def attach(self, live: SimLive, at_s: float) -> None:
        self.at(at_s, lambda: self.device.attach(live))

    def times(self, kind: type) -> list[float]:
        return [at_s for at_s, event in self.reported if isinstance(event, kind)]


def test_a_turn_switches_prefills_decodes_and_ends() -> None:
    bench = Bench()
    live = bench.add("a")
    bench.device.plan(Turn(1, "a", 5.0), None)
    bench.run()
    assert live.token_times_s == pytest.approx([1.02 + 0.01 * k for k in range(11)])
    assert bench.times(e.Stepped) == pytest.approx([1.02, 1.12])
    assert bench.times(e.Ended) == bench.times(e.TurnEnded) == pytest.approx([1.12])
    [stepped] = [one for _, one in bench.reported if isinstance(one, e.Stepped) and one.step_s]
    assert stepped.num_tokens == 10
    assert stepped.step_s == pytest.approx(0.01)


def test_a_turn_ends_after_the_step_in_which_its_quota_ends_if_another_waits() -> None:
    bench = Bench()
    live = bench.add("a", output_tokens=1000)
    bench.device.plan(Turn(1, "a", 0.095), "b")
    bench.run()
    # From 1.0 on: 20 ms of prefill, and eight steps to get past 1.095.
    assert bench.times(e.TurnEnded) == pytest.approx([1.10])
    assert len(live.token_times_s) == 1 + 8


def test_while_nobody_waits_a_turn_goes_on_and_ends_when_somebody_comes() -> None:
    bench = Bench()
    live = bench.add("a", output_tokens=1000)
    turn = Turn(1, "a", 0.5)
    bench.device.plan(turn, None)
    bench.at(3.005, lambda: bench.device.plan(turn, "b"))
    bench.run(5.0)
    assert bench.times(e.TurnEnded) == pytest.approx([3.01])
    assert live.token_times_s[-1] == pytest.approx(3.01)


def test_a_quota_can_be_changed_under_way() -> None:
    bench = Bench()
    bench.add("a", output_tokens=1000)
    bench.device.plan(Turn(1, "a", 4.0), "b")
    bench.at(2.005, lambda: bench.device.plan(Turn(1, "a", 1.5), "b"))
    bench.run(8.0)
    assert bench.times(e.TurnEnded) == pytest.approx([2.50])


def test_a_new_request_is_prefilled_after_the_step_in_progress() -> None:
    bench = Bench()

    def second_arrives() -> None:
        bench.add("a", "second", output_tokens=500)

    first = bench.add("a", "first", output_tokens=500)
    bench.device.plan(Turn(1, "a", 60.0), None)
    bench.run(2.0)
    bench.at(2.003, second_arrives)
    bench.run(3.0)
    prefilled_s = [
        at_s for at_s, event in bench.reported if event == e.Stepped(0, "a", ("second",))
    ]
    assert prefilled_s == pytest.approx([2.01 + 0.02])
    gaps_s = [b - a for a, b in zip(first.token_times_s, first.token_times_s[1:], strict=False)]
    assert max(gaps_s) == pytest.approx(0.01 + 0.02)


def test_a_request_for_another_model_waits_for_its_turn() -> None:
    bench = Bench()
    bench.add("a", output_tokens=100)
    bench.device.plan(Turn(1, "a", 60.0), None)
    other = bench.add("b", "other")
    bench.run()
    assert other.token_times_s == []
    bench.device.plan(Turn(2, "b", 60.0), None)
    bench.run()
    assert len(other.token_times_s) == 11


def test_even_a_turn_of_no_length_does_a_piece_of_work() -> None:
    bench = Bench()
    live = bench.add("a")
    bench.device.plan(Turn(1, "a", 0.0), "b")
    bench.run()
    assert len(live.token_times_s) == 1
    assert bench.times(e.TurnEnded) == pytest.approx([1.02])


def test_a_turn_without_work_ends_at_once() -> None:
    bench = Bench()
    bench.device.plan(Turn(1, "a", 1.0), None)
    bench.run()
    assert bench.times(e.TurnEnded) == [0.0]
    bench.device.plan(None, None)
    assert bench.device.tally.turns == 1


def test_the_next_model_comes_in_during_the_turn() -> None:
    for prefetches, expected_s in ((True, 0.0), (False, 1.0)):
        bench = Bench(prefetches=prefetches)
        bench.add("a", output_tokens=200)
        bench.device.plan(Turn(1, "a", 2.0), "b")
        bench.run(3.02)
        before_s = bench.device.tally.switch_s
        bench.add("b", "other")
        bench.device.plan(Turn(2, "b", 2.0), None)
        assert bench.device.tally.switch_s - before_s == pytest.approx(expected_s)
        assert bench.device.tally.moved_bytes == 20 * GB


def test_tokens_of_a_cut_off_run_are_counted_to_the_end() -> None:
    bench = Bench()
    live = bench.add("a", output_tokens=5000)
    bench.device.plan(Turn(1, "a", 60.0), None)
    bench.run(2.0)
    bench.device.flush(2.0)
    # The first at 1.02 s, then one every 10 ms; the last may lie on the very end.
    assert len(live.token_times_s) == pytest.approx(1 + 98, abs=1)
    assert live.token_times_s[-1] <= 2.0


class TestMigrate:
    def migrated(self, num_tokens: int = 1) -> SimLive:
        live = SimLive(request("a", request_id="moved", output_tokens=50))
        live.token_times_s = [0.0] * num_tokens
        return live

    def test_kv_leaves_when_the_link_is_free(self) -> None:
        bench = Bench()
        one, other = bench.add("a", "one"), bench.add("a", "other")
        bench.device.plan(Turn(1, "a", 60.0), None)
        bench.run(1.041)
        kv_s = 101 * KV / (10 * GB)
        assert bench.device.release(one) == pytest.approx(bench.queue.now_s + kv_s)
        assert bench.device.release(other) == pytest.approx(bench.queue.now_s + 2 * kv_s)

    def test_adopted_between_turns_it_comes_in_with_the_switch(self) -> None:
        bench = Bench()
        bench.attach(self.migrated(), 0.5)
        bench.run(0.5)
        assert bench.times(e.Attached) == [0.5]
        bench.device.plan(Turn(1, "a", 60.0), None)
        assert bench.device.tally.switch_s == pytest.approx(1.0 + 0.101)

    def test_adopted_in_its_turn_it_joins_when_its_kv_is_in(self) -> None:
        bench = Bench()
        bench.add("a", output_tokens=1000)
        bench.device.plan(Turn(1, "a", 60.0), None)
        live = self.migrated()
        bench.attach(live, 2.0)
        bench.run(3.0)
        assert bench.times(e.Attached) == pytest.approx([2.101])
        assert live.token_times_s[1] >= 2.101

    def test_adopted_while_its_model_is_coming_in_its_kv_comes_after_it(self) -> None:
        bench = Bench()
        first, late = self.migrated(), self.migrated()
        bench.attach(first, 0.0)
        bench.run(0.0)
        bench.device.plan(Turn(1, "a", 60.0), None)
        bench.attach(late, 0.5)
        bench.run(5.0)
        in_s = 1.0 + 2 * 0.101
        assert late.token_times_s[1] == pytest.approx(in_s + 0.01)
        assert bench.device.tally.switch_s == pytest.approx(in_s)
        assert bench.device.tally.moved_bytes == 10 * GB + 202 * KV

    def test_the_last_one_given_up_ends_the_turn(self) -> None:
        bench = Bench()
        live = bench.add("a")
        bench.device.plan(Turn(1, "a", math.inf), None)
        bench.run(1.01)
        due = bench.queue.pop()  # its first token
        assert due is not None
        due.event()
        bench.device.release(live)
        bench.run()
        assert bench.times(e.TurnEnded) == pytest.approx([1.02])


class TestChunks:
    """Steps of 10 ms, 20 ms for a prompt of 100 tokens: 0.1 ms each and 10 ms for the prefill."""

    def begin(self, chunk_tokens: int | None = 60) -> tuple[Bench, SimLive]:
        """An answer that has run since 1.0 s, and a turn of the given chunks."""
        bench = Bench()
        live = bench.add("a", "first", output_tokens=500)
        bench.device.plan(Turn(1, "a", 60.0), None)
        bench.run(2.0)
        bench.device.plan(Turn(1, "a", 60.0, chunk_tokens), None)
        return bench, live

    def test_a_prompt_goes_along_with_the_answers_piece_by_piece(self) -> None:
        bench, first = self.begin()
        second: list[SimLive] = []
        bench.at(2.003, lambda: second.append(bench.add("a", "second", output_tokens=500)))
        bench.run(3.0)
        # From 2.01 on: 59 tokens in 10 + 5.9 ms, then 41 in 10 + 4.1 ms.
        assert second[0].token_times_s[0] == pytest.approx(2.01 + 0.0159 + 0.0141)
        gaps_s = [b - a for a, b in zip(first.token_times_s, first.token_times_s[1:], strict=False)]
        assert max(gaps_s) == pytest.approx(0.0159)
        assert e.Stepped(0, "a", ("first",)) in [event for _, event in bench.reported]
        assert e.Stepped(0, "a", ("first", "second")) in [event for _, event in bench.reported]

    def test_what_a_step_has_left_goes_to_the_next_prompt(self) -> None:
        bench = Bench()
        lives = [bench.add("a", name, output_tokens=2) for name in ("r1", "r2")]
        bench.device.plan(Turn(1, "a", 60.0, 150), None)
        bench.run()
        # 150 tokens without any answer: 10 + 15 ms; then the 50 left beside the first answer.
        assert lives[0].token_times_s == pytest.approx([1.025, 1.04])
        assert lives[1].token_times_s[0] == pytest.approx(1.04)

    def test_answers_that_fill_a_step_leave_one_token_to_the_prompt(self) -> None:
        bench, _ = self.begin(chunk_tokens=1)
        second = bench.add("a", "second")
        bench.run(2.05)
        assert 0 < second.done_tokens <= 5

    def test_a_prompt_begun_in_chunks_is_ended_at_once_when_orders_say_so(self) -> None:
        bench, first = self.begin()
        second: list[SimLive] = []
        bench.at(2.003, lambda: second.append(bench.add("a", "second", output_tokens=500)))
        bench.at(2.015, lambda: bench.device.plan(Turn(1, "a", 60.0), None))
        bench.run(2.5)
        # 59 tokens by 2.0259; the other 41 by themselves, in 10 + 4.1 ms.
        assert second[0].token_times_s[:2] == pytest.approx([2.04, 2.05])
        shown_s = [at_s for at_s in first.token_times_s if 2.005 < at_s < 2.055]
        assert shown_s == pytest.approx([2.01, 2.0259, 2.05])
        kv_bytes = bench.device.memory.held_bytes("a")[1]
        assert kv_bytes == KV * (first.context_tokens + second[0].context_tokens)


def test_an_answer_that_is_given_away_keeps_the_tokens_it_has() -> None:
    bench = Bench()
    live = bench.add("a", output_tokens=500)
    other = bench.add("a", "other", output_tokens=500)
    bench.device.plan(Turn(1, "a", 60.0), None)
    bench.run(1.04)
    bench.at(1.065, lambda: bench.release(live))
    bench.run(1.5)
    # First tokens at 1.02 and 1.04, then steps of 10 ms: the one under way is left out.
    assert live.token_times_s == pytest.approx([1.02, 1.05, 1.06])
    assert other.token_times_s[:4] == pytest.approx([1.04, 1.05, 1.06, 1.07])
    assert bench.device.memory.held_bytes("a")[1] == KV * other.context_tokens
    reported = [one.request_ids for _, one in bench.reported if isinstance(one, e.Stepped)]
    assert reported[-1] == ("other",)


def test_kv_of_a_group_of_another_size_is_computed_anew() -> None:
    """The prompt and the tokens so far are prefilled, and the answer goes on where it was."""
    [(name, model)] = models("a").items()
    events: list[e.Event] = []
    queue: EventQueue[Callable[[], None]] = EventQueue()
    device = SimDevice(0, BoxDevice(80 * GB, {name: model}), queue, events.append)
    live = SimLive(request(name, request_id="r", output_tokens=8))
    live.token_times_s = [0.1, 0.2, 0.3]
    device.attach_without_kv(live)
    assert events == [e.Attached("r", 3)]
    assert device.requests.kv_tokens(name) == 0
    device.plan(Turn(1, name, 10.0, None), None)
    while (due := queue.pop()) is not None:
        due.event()
    assert len(live.token_times_s) == 8
    assert e.Ended("r") in events
    switch_s = model.latency.switch_s(model.weight_bytes)
    assert live.token_times_s[3] == pytest.approx(switch_s + model.latency.prefill_s([103]))
    device.check_memory()
