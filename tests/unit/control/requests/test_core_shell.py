"""The shell around the scheduling core: what messages become events."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.requests.core_shell import Scheduler
from gpupoold.domain import Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.named import make_policy
from gpupoold.wire import messages as m
from tests.unit.control.loaded import loaded

NAME = "llama"
READY = m.WorkerReady(0, 1, 1 << 30, 4096, 1e9, "0.32.0")


@pytest.fixture
def scheduler() -> Scheduler:
    """With one worker that has a model."""
    made = Scheduler(make_policy("gpupool"), lambda _: None, clock=lambda: 5.0)
    made.add_model(Targets(), loaded(NAME))
    made.device_up(0, READY, Role.MIXED, is_fixed=False)
    made.host(0, NAME)
    return made


def add(request_id: str, max_tokens: int = 50, output_tokens: int = 0) -> LiveRequest:
    order = m.AddRequest(NAME, request_id, 1.0, 7, max_tokens, [b""])
    return LiveRequest(order, Targets(), output_token_ids=list(range(output_tokens)))


def last_events(scheduler: Scheduler) -> tuple[e.Event, ...]:
    entry = scheduler.core.entries()[-1]
    assert entry.now_s == 5.0
    return entry.events


def stepped(scheduler: Scheduler, *progress: m.RequestProgress) -> tuple[e.Event, ...]:
    scheduler.stepped(0, m.StepOutputs(NAME, 5.0, [], list(progress), 0.02))
    return last_events(scheduler)


def test_a_result_is_a_token_and_the_end(scheduler: Scheduler) -> None:
    scheduler.arrived(add("r", 1))
    events = stepped(scheduler, m.RequestProgress("r", [], "stop", has_result=True))
    assert events == (e.Stepped(0, NAME, ("r",), 1, 0.02), e.Ended("r", is_complete=True))
    assert not scheduler.state.requests


def test_a_pooling_model_is_added_without_decode_steps(scheduler: Scheduler) -> None:
    pooling = replace(loaded("bert"), supported_tasks=("embed", "token_embed"))
    scheduler.add_model(Targets(), pooling)
    [added] = last_events(scheduler)
    assert isinstance(added, e.ModelAdded)
    assert not added.generates
    assert added.costs.step_s(4, 100) == 0.0


def test_a_request_comes_with_the_limit_of_its_answer(scheduler: Scheduler) -> None:
    scheduler.arrived(add("r", 20))
    assert last_events(scheduler) == (e.Arrived("r", NAME, 1.0, 7, max_tokens=20),)
    scheduler.arrived(add("unbounded", 0))
    assert last_events(scheduler) == (e.Arrived("unbounded", NAME, 1.0, 7),)


def test_tokens_made_before_a_death_belong_to_the_answer(scheduler: Scheduler) -> None:
    scheduler.arrived(add("r", 20, output_tokens=3))
    assert last_events(scheduler) == (e.Arrived("r", NAME, 1.0, 7, num_tokens=3, max_tokens=20),)


def test_only_an_answer_that_ends_by_itself_or_by_its_limit_is_complete(
    scheduler: Scheduler,
) -> None:
    for request_id in "abcdefg":
        scheduler.arrived(add(request_id))
    ended = stepped(
        scheduler,
        m.RequestProgress("a", [1], "stop"),
        m.RequestProgress("b", [1], "length"),
        m.RequestProgress("c", [1], "abort"),
        m.RequestProgress("d", [1], "error"),
    )[1:]
    assert ended == (
        e.Ended("a", is_complete=True),
        e.Ended("b", is_complete=True),
        e.Ended("c", is_complete=False),
        e.Ended("d", is_complete=False),
    )
    scheduler.ended(["e"])
    assert last_events(scheduler) == (e.Ended("e", is_complete=False),)
    scheduler.device_down(0, ["f"])
    assert last_events(scheduler) == (e.Ended("f", is_complete=False), e.DeviceDown(0))


def test_memory_that_has_changed_is_told_alone_or_with_the_end_of_a_turn(
    scheduler: Scheduler,
) -> None:
    changed = e.MemoryChanged(0, ((NAME, 5),))
    scheduler.memory_changed(0, m.MemoryReport({NAME: 5}))
    assert last_events(scheduler) == (changed,)
    scheduler.turn_ended(0, m.TurnReport(3, NAME, 0.0, 1.0, {NAME: 5}))
    assert last_events(scheduler) == (changed, e.TurnEnded(0, 3))


def test_the_time_of_a_step_is_told_once(scheduler: Scheduler) -> None:
    """Also where requests gain different numbers of tokens, by speculative decoding."""
    for request_id in "abc":
        scheduler.arrived(add(request_id))
    one = stepped(scheduler, m.RequestProgress("a", [1]), m.RequestProgress("c", [1]))
    assert one == (e.Stepped(0, NAME, ("a", "c"), 1, 0.02),)
    several = stepped(
        scheduler,
        m.RequestProgress("a", [2]),
        m.RequestProgress("b", [1, 2]),
        m.RequestProgress("c", [3]),
    )
    assert several == (
        e.Stepped(0, NAME, ("a", "c", "b"), 0, 0.02),
        e.Stepped(0, NAME, ("a", "c"), 1),
        e.Stepped(0, NAME, ("b",), 2),
    )
