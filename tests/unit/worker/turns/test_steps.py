"""Steps of a turn: what the daemon is told of them, and what may happen in between."""

from __future__ import annotations

import os
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

from gpupoold.domain import Targets
from gpupoold.system.activity import (
    Activity,
    ActivityPage,
    ThreadPhase,
    create_page,
    digest,
    read_page,
)
from gpupoold.wire import messages as m
from gpupoold.wire.channel import FrameTooLong
from gpupoold.worker.engine.grammars import GrammarRefusal
from gpupoold.worker.engine.steps import Step
from gpupoold.worker.turns import requests as turn_steps
from gpupoold.worker.turns.requests import RequestLedger, TurnSteps, may_come_between

DRAFTS = m.DraftCounts(1, 4, 2)


class Engine:
    """A model whose steps take 10 ms of the device, and 3 ms of the host before it is begun."""

    name = "m"

    def __init__(self, clock: Clock, *, is_async: bool) -> None:
        self._clock = clock
        self._is_async = is_async
        self._ends_s: list[float] = []
        self.num_left = 4
        self.num_tokens = 1
        self.chunks: list[int | None] = []
        self.waited_s = 0.0
        self.steps: Any = self
        self.refused: dict[str, GrammarRefusal] = {}

    def take_waited_s(self) -> float:
        waited_s, self.waited_s = self.waited_s, 0.0
        return waited_s

    @property
    def are_under_way(self) -> bool:
        return bool(self._ends_s)

    def has_requests(self) -> bool:
        return self.num_left > 0

    def take_refused(self) -> dict[str, GrammarRefusal]:
        refused, self.refused = self.refused, {}
        return refused

    def take(self) -> list[Step]:
        return []

    def begin(self, chunk_tokens: int | None) -> list[Step]:
        self.chunks.append(chunk_tokens)
        self._clock.now_s += 0.003
        begins_s = max([self._clock.now_s, *self._ends_s])
        self._ends_s.append(begins_s + 0.01)
        return self._wait() if len(self._ends_s) > self._is_async else []

    def settle(self) -> list[Step]:
        return self._wait() if self._ends_s else []

    def _wait(self) -> list[Step]:
        self._clock.now_s = max(self._clock.now_s, self._ends_s.pop(0))
        self.num_left -= 1
        reason = None if self.num_left else "length"
        return [
            Step(
                [b"frame"],
                [m.RequestProgress("r", [7] * self.num_tokens, reason)],
                True,
                {0: 1},
                [] if reason is None else ["r"],
                drafts=DRAFTS,
            )
        ]


class Clock:
    now_s = 100.0


class Told:
    """The steps of a turn on a clock, and what is sent of them."""

    def __init__(self, *, is_async: bool) -> None:
        clock = Clock()
        self.engine: Any = Engine(clock, is_async=is_async)
        self.ledger = RequestLedger(lambda _, request_id: self.num_tokens.get(request_id))
        self.ledger.add_model("m", Targets(1.0, 0.1))
        self.ledger.arrive("m", "r", 99.0)
        self.num_tokens = {"r": 0}
        self.sent: list[m.StepOutputs] = []
        self.steps = TurnSteps(self.ledger, self.sent.append, lambda: clock.now_s)

    @property
    def steps_s(self) -> list[float | None]:
        return [one.step_s and round(one.step_s, 6) for one in self.sent]


@pytest.fixture(params=[False, True], ids=["one by one", "ahead"])
def told(request: pytest.FixtureRequest) -> Told:
    return Told(is_async=request.param)


def test_every_step_is_told_once(told: Told) -> None:
    while told.ledger.num_live("m"):
        assert told.steps.begin(told.engine, 64)
    told.steps.settle()
    assert len(told.sent) >= 4
    assert {one.model for one in told.sent} == {"m"}
    assert set(told.engine.chunks) == {64}
    assert told.steps.num_begun == len(told.engine.chunks)
    told.steps.settle()
    assert not told.engine.are_under_way


def test_steps_take_what_the_device_took_when_the_host_works_ahead() -> None:
    told = Told(is_async=True)
    for _ in range(3):
        told.steps.begin(told.engine, None)
    told.steps.settle()
    # The first had to be prepared while the device had nothing to do.
    assert told.steps_s == [0.013, 0.01, 0.01]


def test_a_step_is_expected_to_be_like_the_one_before() -> None:
    told = Told(is_async=True)
    told.steps.begin(told.engine, None)
    told.steps.begin(told.engine, None)
    [first] = told.sent
    assert told.steps.expected_end_s() == pytest.approx(first.at_s + 0.013)
    told.steps.begin(told.engine, None)
    assert told.steps.expected_end_s() == pytest.approx(told.sent[-1].at_s + 0.01)


def test_steps_take_host_and_device_one_by_one() -> None:
    told = Told(is_async=False)
    for _ in range(3):
        told.steps.begin(told.engine, None)
    assert told.steps_s == [0.013, 0.013, 0.013]


def test_the_time_of_a_step_with_accepted_drafts_is_told_per_token() -> None:
    told = Told(is_async=False)
    told.engine.num_tokens = 3
    told.steps.begin(told.engine, None)
    assert told.steps_s == [round(0.013 / 3, 6)]
    assert told.sent[0].drafts == DRAFTS


@pytest.mark.parametrize("is_async", [False, True])
def test_a_step_that_waited_for_weights_is_no_sample(is_async: bool) -> None:
    told = Told(is_async=is_async)
    told.engine.waited_s = 0.05
    for _ in range(3):
        told.steps.begin(told.engine, None)
    told.steps.settle()
    first, *others = told.steps_s
    assert first is None
    assert others == [0.01 if is_async else 0.013] * 2


def test_an_engine_without_requests_is_noticed(told: Told) -> None:
    told.engine.num_left = 0
    told.engine.begin = lambda _: []
    assert not told.steps.begin(told.engine, None)


def test_steps_that_ended_elsewhere_are_told_first(told: Told) -> None:
    ended = Step([b"before"], [m.RequestProgress("r", [6])], True, {0: 1})
    told.engine.take = lambda: [ended]
    told.steps.begin(told.engine, None)
    told.steps.settle()
    assert [one.frames for one in told.sent] == [[b"before"], [b"frame"]]


def test_prompts_are_no_samples_of_decoding(told: Told) -> None:
    told.engine.settle = lambda: [
        Step([b"frame"], [m.RequestProgress("r", [7])], False, {0: 1}),
        Step([], [], False, {}),
    ]
    told.steps.begin(told.engine, None)
    told.sent.clear()
    told.steps.settle()
    assert [one.step_s for one in told.sent] == [None]


@pytest.mark.parametrize(
    ("message", "may"),
    [
        (m.AddRequest("m", "r", 0.0, 3, 0, []), True),
        (m.AddRequest("m", "r", 0.0, 3, 0, [], [5]), False),  # one that goes on
        (m.RunTurn(1, "m", 1.0), True),
        (m.EndTurn(), True),
        (m.AbortRequests("m", ["r"]), False),
        (m.MigrateOut("m", "r"), False),
        (m.UnloadModel("m"), False),
        (m.DropSnapshot("m"), False),
        (m.Call(1, "page_out", {}), False),
        (m.Shutdown(), False),
    ],
)
def test_only_what_touches_nothing_comes_between_steps(message: Any, may: bool) -> None:
    assert may_come_between(message) is may


def test_outputs_that_no_message_carries_end_their_requests(
    told: Told, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker goes on, and so do the others' streams."""
    page, fd, seen = ActivityPage(), create_page(), dict[str, list[Activity]]()
    page.attach(os.dup(fd))
    monkeypatch.setattr(turn_steps, "WORKER", page)

    def send(outputs: m.StepOutputs) -> None:
        [item] = outputs.progress
        seen[item.request_id] = read_page(fd)
        if item.request_id == "long":
            raise FrameTooLong("StepOutputs of 9 bytes is over the limit of 8")
        told.sent.append(outputs)

    told.ledger.arrive("m", "long", 99.0)
    steps = TurnSteps(told.ledger, send)
    told.engine.begin = lambda _: [
        Step([frame], [m.RequestProgress(name, [7])], False, {0: 1})
        for name, frame in (("r", b"frame"), ("long", bytes(1 << 20)), ("r", b"frame"))
    ]
    assert steps.begin(told.engine, None)
    assert [one.progress[0].request_id for one in told.sent] == ["r", "r"]
    long = Activity(ThreadPhase.STEP, "m", frozenset({digest("long")}))
    assert seen == {"r": [], "long": [long]}, "a lack of memory is due to long outputs"
    assert steps.take_unsendable() == [
        m.RequestsFailed("m", ["long"], "StepOutputs of 9 bytes is over the limit of 8")
    ]
    assert steps.take_unsendable() == []
    os.close(fd)


def test_refused_grammar_is_to_be_ended_and_reported(told: Told) -> None:
    told.engine.refused = {"r": GrammarRefusal("too costly", "digest")}
    told.engine.begin = lambda _: []
    told.engine.num_left = 0
    assert told.steps.begin(told.engine, None), "the engine has not lost the request"
    assert told.steps.take_unsendable() == [
        m.RequestsFailed("m", ["r"], "too costly", code="grammar_over_bound", grammar="digest")
    ]
    told.engine.refused = {"r": GrammarRefusal("others take long", is_final=False)}
    told.steps.begin(told.engine, None)
    assert told.steps.take_unsendable() == [m.RequestsFailed("m", ["r"], "others take long")]
