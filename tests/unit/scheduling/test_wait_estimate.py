"""How long requests would wait, where that can be worked out by hand."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.gpupool import GpupoolPolicy
from gpupoold.scheduling.state import Model, State
from gpupoold.scheduling.wait_estimate import (
    Drain,
    WaitingAnswer,
    drain_of,
    first_token_in_s,
    next_token_in_s,
)
from tests.unit.scheduling.driver import GB, STEP_S, Driver

PREFILL_S = 0.1
SWITCH_S = 1.0  # 10 GB at 10 GB/s


def driver(models: str = "a b c", **more: object) -> Driver:
    return Driver(GpupoolPolicy(), models, **more)  # type: ignore[arg-type]


def first_s(rig: Driver, model: str = "a") -> float | None:
    return first_token_in_s(rig.state, rig.state.models[model], 100, rig.now_s)


def resident(rig: Driver, *models: str) -> None:
    rig.send(e.MemoryChanged(0, tuple((model, 0) for model in models)))


def decoding(rig: Driver, model: str, *names: str, num_tokens: int = 1) -> None:
    """Answers under way."""
    for name in names:
        rig.arrive(model, name)
    rig.step(0, *names, num_tokens=num_tokens)


class TestFirstToken:
    def test_nobody_is_there(self) -> None:
        rig = driver()
        assert first_s(rig) == pytest.approx(SWITCH_S + PREFILL_S)
        resident(rig, "a")
        assert first_s(rig) == pytest.approx(PREFILL_S)

    def test_no_device_has_the_model(self) -> None:
        rig = driver()
        rig.send(e.DeviceDown(0))
        assert first_s(rig) is None

    def test_prompts_of_its_own_model_go_before_it(self) -> None:
        rig = driver()
        resident(rig, "a")
        for _ in range(3):
            rig.arrive("a")
        # Nothing decodes yet; steps and prefills come one after the other.
        assert first_s(rig) == pytest.approx(4 * PREFILL_S, abs=STEP_S)

    def test_others_that_are_due_before_it(self) -> None:
        rig = driver()
        resident(rig, "a", "b", "c")
        decoding(rig, "b", "b1", "b2")
        rig.arrive("c")
        rig.now_s = 0.5
        assert (rig.running(), rig.state.devices[0].then) == ("b", "c")
        left_s = rig.quota_s() - 0.5
        in_s = first_s(rig)
        assert in_s is not None
        # The turn of b, then a turn of c: at least the prefill and a moment of decoding.
        assert left_s + 0.25 + 2 * PREFILL_S <= in_s <= left_s + 4.0 + 2 * PREFILL_S

    def test_a_turn_ends_early_for_whoever_cannot_wait(self) -> None:
        rig = driver("a b", targets=Targets(1.0, 0.1))
        resident(rig, "a", "b")
        decoding(rig, "b", "b1", "b2")
        rig.arrive("a", "a1")
        rig.send(e.Ended("a1"))
        # So that seven tenths of its second have gone at its first token.
        assert first_s(rig) == pytest.approx(min(rig.quota_s() + PREFILL_S, 0.7))

    def test_the_free_device_counts(self) -> None:
        rig = driver(num_devices=2)
        resident(rig, "a")
        rig.send(e.MemoryChanged(1, (("a", 0),)))
        decoding(rig, "b", *(f"b{n}" for n in range(40)))
        assert first_s(rig) == pytest.approx(PREFILL_S)

    def test_kv_without_room_has_to_end_first(self) -> None:
        kv = {"kv_bytes_per_token": 10**7, "capacity_bytes": 16 * GB, "kv_host_bytes": 10**6}
        rig = driver("a", **kv)
        resident(rig, "a")
        decoding(rig, "a", "a1")
        # An answer of 256 tokens is taken to be under way.
        assert first_s(rig) == pytest.approx(256 * STEP_S, rel=0.25)
        rig.arrive("a", "a2")
        assert rig.state.devices[0].num_waiting_for_kv == 1
        assert first_s(rig) == pytest.approx(256 * STEP_S * 2, rel=0.25)


class TestDrain:
    def test_nobody_is_there(self) -> None:
        rig = driver()
        assert drain_of(rig.state, None, 0.0).seconds_until(1) is None

    def test_known_lengths_end_when_they_must(self) -> None:
        rig = driver("a")
        resident(rig, "a")
        decoding(rig, "a", "a1", "a2", num_tokens=10)
        drain = drain_of(rig.state, None, 0.0, lambda _: 110)
        # 100 more tokens, and for each answer one prefill of the next.
        expected_s = 100 * (STEP_S + 2 * PREFILL_S / 256)
        assert drain.num_answers == 2
        assert drain.seconds_until(1) == pytest.approx(expected_s, rel=0.25)
        assert drain.seconds_until(2) == pytest.approx(expected_s, rel=0.25)

    def test_more_than_there_are_take_as_long_again(self) -> None:
        drain = Drain(4, (1.0, 2.0, 3.0), (0.0, 2.0, 4.0))
        assert [drain.seconds_until(n) for n in (1, 2, 3, 4)] == [1.5, 2.0, 2.5, 3.0]
        assert drain.seconds_until(5) == 4.5
        assert drain.seconds_until(8) == 6.0

    def test_one_model_or_all(self) -> None:
        rig = driver()
        resident(rig, "a", "b")
        decoding(rig, "a", "a1", num_tokens=200)
        decoding(rig, "b", "b1", "b2")
        model = rig.state.models
        assert drain_of(rig.state, model["a"], 0.0).num_answers == 1
        assert drain_of(rig.state, model["b"], 0.0).num_answers == 2
        assert drain_of(rig.state, model["c"], 0.0).num_answers == 0
        assert drain_of(rig.state, None, 0.0).num_answers == 3

    def test_short_answers_before_tell_of_short_ones_to_come(self) -> None:
        def one_in_s(num_tokens: int) -> float:
            rig = driver("a")
            resident(rig, "a")
            for number in range(20):
                decoding(rig, "a", f"old{number}", num_tokens=num_tokens)
                rig.send(e.Ended(f"old{number}"))
            decoding(rig, "a", "a1")
            in_s = drain_of(rig.state, None, rig.now_s).seconds_until(1)
            assert in_s is not None
            return in_s

        assert one_in_s(20) < one_in_s(100) / 2

    def test_those_that_wait_for_a_device_are_left_out(self) -> None:
        rig = driver()
        rig.send(e.DeviceDown(0))
        rig.arrive("a")
        assert drain_of(rig.state, None, 0.0).num_answers == 0

    def test_thousands_are_sampled(self) -> None:
        rig = Driver(GpupoolPolicy(), "a")
        for number in range(1000):
            rig.core.handle([e.Arrived(f"r{number}", "a", 0.0, 100, None)], 0.0)
        drain = drain_of(rig.state, None, 0.0)
        assert drain.num_answers == 1000
        assert list(drain.num_ended) == sorted(drain.num_ended)
        assert len(drain.times_s) <= 80


def test_answers_that_have_outgrown_all_others() -> None:
    answer = WaitingAnswer(1.0, 0.1, 50, 1000, [10, 20, 30])
    assert answer.ended_by(5.9) == 0.0
    assert answer.ended_by(6.1) == 1.0
    among = WaitingAnswer(0.0, 0.1, 15, 1000, [10, 20, 30])
    assert [among.ended_by(at_s) for at_s in (0.4, 0.6, 1.6)] == [0.0, 0.5, 1.0]
    assert among._replace(max_tokens=18).ended_by(0.3) == 1.0


def test_a_model_without_anything_known_of_it() -> None:
    state = State()
    model = Model("a", Targets(1.0, 0.1), GB, 1, ModelCosts())
    assert first_token_in_s(state, model, 10, 0.0) is None


def next_s(rig: Driver, name: str) -> float | None:
    return next_token_in_s(rig.state, rig.state.requests[name], rig.now_s)


class TestNextToken:
    def test_of_an_answer_on_turn(self) -> None:
        rig = driver()
        resident(rig, "a")
        decoding(rig, "a", "r")
        # On average a step is half over.
        assert next_s(rig, "r") == pytest.approx(STEP_S / 2)

    def test_of_a_prompt_on_turn(self) -> None:
        rig = driver()
        resident(rig, "a")
        rig.arrive("a", "r")
        # The step that may be under way is reckoned with.
        assert next_s(rig, "r") == pytest.approx(PREFILL_S, abs=STEP_S)

    def test_a_request_that_waits_is_not_counted_twice(self) -> None:
        rig = driver()
        resident(rig, "a", "b")
        decoding(rig, "a", "r")
        before = first_s(rig, "b")
        rig.arrive("b", "waits")
        assert next_s(rig, "waits") == pytest.approx(before)

    def test_of_a_paused_answer_whose_turn_is_next(self) -> None:
        rig = driver()
        resident(rig, "a", "b")
        decoding(rig, "a", "r")
        rig.arrive("b", "other")
        rig.end_turn()
        assert rig.running() == "b"
        left_s = rig.quota_s()
        assert next_s(rig, "r") == pytest.approx(left_s + STEP_S)
        rig.now_s += 0.02
        assert next_s(rig, "r") == pytest.approx(left_s - 0.02 + STEP_S)

    def test_without_a_device(self) -> None:
        rig = driver()
        rig.arrive("a", "r")
        rig.send(e.DeviceDown(0))
        assert next_s(rig, "r") is None

    def test_whoever_waits_for_kv_room_waits_for_answers_to_end(self) -> None:
        rig = driver("a", capacity_bytes=12 * GB, kv_bytes_per_token=1_000_000, kv_host_bytes=0)
        resident(rig, "a")
        for name in ("a1", "a2", "a3", "a4"):
            rig.arrive("a", name, prompt_tokens=700)
            rig.now_s += 0.01
        rig.step(0, "a1", "a2")
        third, fourth = next_s(rig, "a3"), next_s(rig, "a4")
        assert third is not None
        assert fourth is not None
        # Answers are taken to get 256 tokens.
        assert 200 * STEP_S < third <= fourth
