"""KV that outgrows a device: prompts wait, and the latest request is preempted, as in vLLM."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from gpupoold.scheduling.events import Action, Event
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import SimOutcome, Simulation
from gpupoold.sim.policies import PolicyOptions, make_policy
from gpupoold.sim.workloads import SimRequest
from tests.sim.box import GB, models, request
from tests.unit.simdevice.box import KV_BYTES, STEP_S, Box

ROOM_TOKENS = 500


def run(*requests: SimRequest, names: str = "a", may_exceed: bool = False) -> SimOutcome:
    """One device with KV memory for 500 tokens beside a model, and unlimited host memory."""
    box = models(names, kv_bytes_per_token=1_000_000)
    capacity_bytes = 10 * GB + ROOM_TOKENS * 1_000_000
    simulation = Simulation(
        box, make_policy("gpupool", PolicyOptions()), [BoxDevice(capacity_bytes)]
    )
    [device] = simulation._devices
    handle = simulation.core.handle

    def checked(events: Iterable[Event], now_s: float) -> list[Action]:
        device.check_memory()
        assert may_exceed or device.memory.free_bytes >= 0
        return handle(events, now_s)

    simulation.core.handle = checked  # type: ignore[method-assign]
    outcome = simulation.run(requests, 1000.0)
    device.check_memory()
    assert all(result.is_finished for result in outcome.results)
    return outcome


def answer(name: str, output_tokens: int, prompt_tokens: int = 100) -> SimRequest:
    return request("a", request_id=name, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def longest_gap_s(outcome: SimOutcome, index: int) -> float:
    times_s = outcome.results[index].token_times_s
    return max(later - earlier for earlier, later in itertools.pairwise(times_s))


def test_the_latest_answer_is_preempted_and_computed_anew() -> None:
    outcome = run(answer("first", 250), answer("second", 250))
    assert outcome.num_preemptions == 1
    first, second = outcome.results
    # At 250 tokens each the device is full: 150 tokens of the second are computed anew at the end
    # of the first, which has 99 steps left. A prefill takes 10 ms and 0.1 ms a token.
    assert longest_gap_s(outcome, 0) == pytest.approx(0.02 + 0.01), (
        "beside the second's first prefill"
    )
    assert longest_gap_s(outcome, 1) == pytest.approx(99 * 0.01 + 0.01 + 0.0250, abs=0.011)
    assert second.token_times_s[-1] > first.token_times_s[-1]


def test_answers_that_fit_are_not_preempted() -> None:
    assert run(answer("first", 150), answer("second", 150)).num_preemptions == 0


def test_a_prompt_waits_for_memory() -> None:
    outcome = run(answer("first", 200, prompt_tokens=290), answer("second", 2, prompt_tokens=220))
    assert outcome.num_preemptions == 0
    first, second = outcome.results
    assert second.token_times_s[0] > first.token_times_s[-1]


def test_a_lone_request_may_exceed_the_device() -> None:
    outcome = run(answer("long", 900), may_exceed=True)
    assert outcome.num_preemptions == 0
    assert longest_gap_s(outcome, 0) == pytest.approx(0.01)


def test_other_models_leave_first() -> None:
    """KV of a paused model is copied to the host before a request is preempted."""
    other = request("b", request_id="b", prompt_tokens=300, output_tokens=100)
    outcome = run(other, answer("first", 120), answer("second", 110), names="ab")
    assert outcome.num_preemptions == 0


def test_a_prompt_in_chunks_is_preempted_before_answers() -> None:
    """A prompt of which each step takes a token begins, and loses its memory to the answer."""
    box = Box("a", capacity_gb=10 + 300 * KV_BYTES / GB)
    box.ask("a", "first", max_tokens=190)
    box.turn("a", chunk_tokens=2)
    while not box.tokens("first"):
        box.at(box.now_s + STEP_S)
    second = box.ask("a", "second", max_tokens=5, prompt=150)
    box.at(box.now_s + 20 * STEP_S)
    assert 0 < second.done_tokens < 150
    box.at(20.0)
    assert box.sim.kv_room.num_preemptions == 1
    assert [len(box.tokens(name)) for name in ("first", "second")] == [190, 5]
    assert box.token_times("second")[0] > box.token_times("first")[-1]
    box.sim.check_memory()


def test_a_request_that_is_preempted_on_a_simulated_device_keeps_its_tokens() -> None:
    box = Box("a", capacity_gb=10 + 400 * KV_BYTES / GB)
    box.ask("a", "first", max_tokens=200)
    box.ask("a", "second", max_tokens=200)
    box.turn("a")
    box.at(20.0)
    assert box.sim.kv_room.num_preemptions == 1
    assert [len(box.tokens(name)) for name in ("first", "second")] == [200, 200]
    assert box.finish("second") == "length"
