"""The shell around the scheduling core: what messages become events."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.requests.core_shell import (
    CoreShell,
    arrived,
    bandwidth_measured,
    cut_short,
    device_up,
    memory_changed,
    model_added,
    stepped,
)
from gpupoold.domain import DeviceFacts, Role, Targets
from gpupoold.scheduling import events as e
from gpupoold.scheduling.policies.named import make_policy
from gpupoold.wire import messages as m
from tests.unit.control.loaded import loaded

NAME = "llama"
READY = m.WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0")


@pytest.fixture
def shell() -> CoreShell:
    """With one worker that has a model."""
    made = CoreShell(make_policy("gpupool"), lambda _: None, clock=lambda: 5.0)
    made.handle(model_added(Targets(), loaded(NAME)))
    made.handle(device_up(0, READY, Role.MIXED, is_fixed=False), e.Hosted(0, NAME))
    return made


def add(request_id: str, max_tokens: int = 50, output_tokens: int = 0) -> LiveRequest:
    order = m.AddRequest(NAME, request_id, 1.0, 7, max_tokens, [b""])
    return LiveRequest(order, Targets(), output_token_ids=list(range(output_tokens)))


def step(*progress: m.RequestProgress) -> list[e.Event]:
    return stepped(0, m.StepOutputs(NAME, 5.0, [], list(progress), 0.02))


def test_a_result_is_a_token_and_the_end(shell: CoreShell) -> None:
    shell.handle(arrived(add("r", 1)))
    events = step(m.RequestProgress("r", [], "stop", has_result=True))
    assert events == [e.Stepped(0, NAME, ("r",), 1, 0.02), e.Ended("r", is_complete=True)]
    shell.handle(*events)
    assert not shell.core.state.requests


def test_one_call_of_the_core_has_all_events_and_no_call_has_none(shell: CoreShell) -> None:
    num_calls = len(shell.core.entries())
    shell.handle()
    shell.handle(arrived(add("r", 1)), *cut_short([add("r", 1)]))
    [entry] = shell.core.entries()[num_calls:]
    assert entry.now_s == 5.0
    assert [type(one) for one in entry.events] == [e.Arrived, e.Ended]
    assert len(shell.decisions) == len(shell.core.entries())


def test_a_pooling_model_is_added_without_decode_steps() -> None:
    pooling = replace(loaded("bert"), supported_tasks=("embed", "token_embed"))
    added = model_added(Targets(), pooling)
    assert not added.generates
    assert added.costs.step_s(4, 100) == 0.0


def test_a_request_comes_with_the_limit_of_its_answer() -> None:
    assert arrived(add("r", 20)) == e.Arrived("r", NAME, 1.0, 7, max_tokens=20)
    assert arrived(add("unbounded", 0)) == e.Arrived("unbounded", NAME, 1.0, 7)


def test_tokens_made_before_a_death_belong_to_the_answer() -> None:
    event = arrived(add("r", 20, output_tokens=3))
    assert event == e.Arrived("r", NAME, 1.0, 7, num_tokens=3, max_tokens=20)


def test_only_an_answer_that_ends_by_itself_or_by_its_limit_is_complete() -> None:
    ended = step(
        m.RequestProgress("a", [1], "stop"),
        m.RequestProgress("b", [1], "length"),
        m.RequestProgress("c", [1], "abort"),
        m.RequestProgress("d", [1], "error"),
    )[1:]
    assert ended == [
        e.Ended("a", is_complete=True),
        e.Ended("b", is_complete=True),
        e.Ended("c", is_complete=False),
        e.Ended("d", is_complete=False),
    ]
    assert cut_short([add("e", 1)]) == [e.Ended("e", is_complete=False)]


def test_memory_that_has_changed_is_told_alone_or_with_the_end_of_a_turn() -> None:
    changed = e.MemoryChanged(0, ((NAME, 5),))
    assert memory_changed(0, m.MemoryReport({NAME: 5})) == changed
    assert memory_changed(0, m.TurnReport(3, NAME, 0.0, 1.0, {NAME: 5})) == changed


def test_a_bandwidth_is_told_after_a_change_of_more_than_a_few_per_cent(shell: CoreShell) -> None:
    state = shell.core.state
    assert bandwidth_measured(state, 0, 2e9) == [e.BandwidthMeasured(0, 2e9)]
    for number, bandwidth_bytes_per_s in ((0, 1.04e9), (0, 0.0), (0, float("nan")), (1, 2e9)):
        assert not bandwidth_measured(state, number, bandwidth_bytes_per_s)


def test_the_time_of_a_step_is_told_once() -> None:
    """Also where requests gain different numbers of tokens, by speculative decoding."""
    one = step(m.RequestProgress("a", [1]), m.RequestProgress("c", [1]))
    assert one == [e.Stepped(0, NAME, ("a", "c"), 1, 0.02)]
    several = step(
        m.RequestProgress("a", [2]), m.RequestProgress("b", [1, 2]), m.RequestProgress("c", [3])
    )
    assert several == [
        e.Stepped(0, NAME, ("a", "c", "b"), 0, 0.02),
        e.Stepped(0, NAME, ("a", "c"), 1),
        e.Stepped(0, NAME, ("b",), 2),
    ]
