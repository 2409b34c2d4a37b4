"""Steps that are prepared while another is computed: what is waited for, and when."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the engine is not installed")

import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.serial_utils import MsgpackDecoder

from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.wire import messages as m
from gpupoold.wire.messages import RequestProgress
from gpupoold.worker.engine import steps as engine_steps
from gpupoold.worker.engine.grammars import GrammarRefusal
from gpupoold.worker.engine.steps import EngineSteps, Step


class Core:
    """As vLLM's engine core: a step gives every request a token; two may be under way."""

    def __init__(self, *, is_async: bool) -> None:
        self.scheduler: Any = SimpleNamespace(
            is_held=False, chunk_tokens=None, num_updates=0, was_decode=False, isolated={}
        )
        self.scheduler.take_drafts = lambda: m.DraftCounts(1, 4, 1)
        self.scheduler.take_turns = lambda *, may_isolate: self.turns.append(may_isolate)
        self.scheduler.requests = {"r": None}
        self.refused: dict[str, GrammarRefusal] = {}
        self.structured_output_manager = SimpleNamespace(take_refused=self._take_refused)
        self.turns: list[bool] = []
        self.batch_queue: deque[int] | None = deque() if is_async else None
        self.num_begun = 0
        self.fails = False
        self.is_empty = False
        self.others: dict[int, EngineCoreOutputs] = {}
        self.names = ["r"]
        self.chunks: list[int | None] = []

    def step_fn(self) -> tuple[dict[int, EngineCoreOutputs] | None, bool]:
        if not self.scheduler.is_held:
            self.num_begun += 1
            self.chunks.append(self.scheduler.chunk_tokens)
            if self.batch_queue is None:
                return self._outputs(self.num_begun), True
            self.batch_queue.append(self.num_begun)
            if len(self.batch_queue) < 2:
                return None, True
        assert self.batch_queue is not None
        return self._outputs(self.batch_queue.popleft()), not self.scheduler.is_held

    def post_step(self, model_executed: bool) -> None:
        """Of interest to drafts only."""

    def _take_refused(self) -> dict[str, GrammarRefusal]:
        refused, self.refused = self.refused, {}
        return refused

    def _outputs(self, number: int) -> dict[int, EngineCoreOutputs]:
        self.scheduler.num_updates += 1
        self.scheduler.was_decode = number > 1
        if self.fails:
            raise RuntimeError("lost")
        if self.is_empty:
            return {}
        made = [EngineCoreOutput(request_id=name, new_token_ids=[number]) for name in self.names]
        return {0: EngineCoreOutputs(outputs=made), **self.others}


def tokens(steps: list[Step]) -> list[int]:
    return [token for step in steps for item in step.progress for token in item.new_token_ids]


@pytest.mark.parametrize("is_async", [False, True])
def test_no_result_has_a_request_that_is_refused(is_async: bool) -> None:
    """Until it has been ended, as its grammar does not constrain it any more."""
    core, refusal = Core(is_async=is_async), GrammarRefusal("too costly", "digest")
    core.names = ["r", "costly"]
    core.scheduler.requests = {"r": None, "costly": None}
    steps = EngineSteps(core)  # type: ignore[arg-type]
    steps.begin()
    steps.settle()
    core.refused = {"costly": refusal}
    made = [*steps.begin(), *steps.settle(), *steps.begin(), *steps.settle()]
    assert {item.request_id for step in made for item in step.progress} == {"r"}
    assert steps.take_refused() == {"costly": refusal}
    assert steps.take_refused() == {}
    del core.scheduler.requests["costly"]
    steps.begin()
    steps.settle()
    core.names = ["r", "costly"]  # another request with the id
    assert [len(step.progress) for step in [*steps.begin(), *steps.settle()]] == [2]


def test_results_of_pooling_requests_are_told() -> None:
    core = Core(is_async=False)
    result = torch.tensor([0.5, -1.0])
    made = EngineCoreOutput(
        request_id="p", new_token_ids=[], pooling_output=result, finish_reason=FinishReason.STOP
    )
    core.others = {1: EngineCoreOutputs(outputs=[made])}
    [step] = EngineSteps(core).begin()  # type: ignore[arg-type]
    assert list(step.pooled) == ["p"]
    assert step.pooled["p"] is result
    progress = {item.request_id: item for item in step.progress}
    assert progress["p"] == RequestProgress("p", [], "stop", has_result=True)
    assert [progress[name].num_tokens for name in ("r", "p")] == [1, 1]


def test_one_after_the_other_is_waited_for() -> None:
    steps = EngineSteps(Core(is_async=False))  # type: ignore[arg-type]
    assert [tokens(steps.begin()) for _ in range(3)] == [[1], [2], [3]]
    assert not steps.are_under_way
    assert steps.settle() == []


def test_a_step_is_begun_before_the_last_one_is_told() -> None:
    core = Core(is_async=True)
    steps = EngineSteps(core)  # type: ignore[arg-type]
    assert steps.begin(64) == []
    assert steps.are_under_way
    assert [tokens(steps.begin()) for _ in range(2)] == [[1], [2]]
    assert (core.num_begun, core.chunks) == (3, [64, None, None])
    assert tokens(steps.settle()) == [3]
    assert not steps.are_under_way


def test_drafts_are_told_with_the_outputs_of_a_step() -> None:
    core = Core(is_async=False)
    steps = EngineSteps(core)  # type: ignore[arg-type]
    [step] = steps.begin()
    assert step.drafts == m.DraftCounts(1, 4, 1)
    core.is_empty = True
    [empty] = steps.begin()
    assert empty.drafts is None, "nobody is told of a step without outputs"


def test_settling_begins_nothing() -> None:
    core = Core(is_async=True)
    steps = EngineSteps(core)  # type: ignore[arg-type]
    steps.begin()
    steps.settle()
    assert steps.settle() == []
    assert core.num_begun == 1
    assert not core.scheduler.is_held


def test_what_came_while_nobody_asked_is_told_next() -> None:
    steps = EngineSteps(Core(is_async=True))  # type: ignore[arg-type]
    steps.begin()
    steps.wait()
    assert not steps.are_under_way
    assert tokens(steps.begin()) == [1]
    assert tokens(steps.settle()) == [2]


def test_a_step_that_fails_while_it_is_settled_leaves_the_scheduler_free() -> None:
    core = Core(is_async=True)
    steps = EngineSteps(core)  # type: ignore[arg-type]
    steps.begin()
    core.fails = True
    with pytest.raises(RuntimeError, match="lost"):
        steps.settle()
    assert not core.scheduler.is_held


def test_a_step_says_whether_it_was_next_tokens_only() -> None:
    steps = EngineSteps(Core(is_async=True))  # type: ignore[arg-type]
    made = [*steps.begin(), *steps.begin(), *steps.settle()]
    assert [step.is_decode for step in made] == [False, True]
    assert all(step.frames for step in made)


def test_an_empty_step_is_told_without_frames() -> None:
    core = Core(is_async=False)
    core.is_empty = True
    [step] = EngineSteps(core).begin()  # type: ignore[arg-type]
    assert (step.frames, step.progress) == ([], [])


def test_outputs_of_each_frontend_are_frames_of_their_own() -> None:
    core = Core(is_async=False)
    others = [EngineCoreOutput("s", [7]), EngineCoreOutput("t", [8])]
    core.others = {2: EngineCoreOutputs(outputs=others), 1: EngineCoreOutputs()}
    [step] = EngineSteps(core).begin()  # type: ignore[arg-type]
    assert [item.request_id for item in step.progress] == ["r", "s", "t"]
    assert step.frame_counts == {0: 1, 2: 1}
    decode = MsgpackDecoder(EngineCoreOutputs).decode
    made = [[one.request_id for one in decode([frame]).outputs] for frame in step.frames]
    assert made == [["r"], ["s", "t"]]


def test_a_step_too_long_for_a_message_is_several(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Core(is_async=False)
    core.names = [f"request-{number}" for number in range(5)]
    core.others = {2: EngineCoreOutputs(outputs=[EngineCoreOutput("of another frontend", [8])])}
    [whole] = EngineSteps(core).begin()  # type: ignore[arg-type]
    monkeypatch.setattr(engine_steps, "_MAX_STEP_BYTES", sum(map(len, whole.frames)) // 2)
    parts = EngineSteps(core).begin()  # type: ignore[arg-type]
    assert len(parts) > 1
    decode = MsgpackDecoder(EngineCoreOutputs).decode
    for part in parts:
        assert sum(map(len, part.frames)) <= sum(map(len, whole.frames)) // 2
        assert set(part.frame_counts) <= {0, 2}
        made = [one.request_id for frame in part.frames for one in decode([frame]).outputs]
        assert made == [item.request_id for item in part.progress]
    told = [item.request_id for part in parts for item in part.progress]
    assert told == [*core.names, "of another frontend"]


def test_outputs_of_one_request_stay_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_steps, "_MAX_STEP_BYTES", 1)
    [step] = EngineSteps(Core(is_async=False)).begin()  # type: ignore[arg-type]
    assert step.frames


def test_while_a_request_is_isolated_every_step_is_waited_for() -> None:
    core = Core(is_async=True)
    steps = EngineSteps(core)  # type: ignore[arg-type]
    steps.begin()
    core.scheduler.isolated["r"] = None
    assert tokens(steps.begin()) == [1, 2]
    assert not steps.are_under_way
    with WORKER.beside(ThreadPhase.COPY):
        assert tokens(steps.begin()) == [3]
    assert core.turns == [True, False]
