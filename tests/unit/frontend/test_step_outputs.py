"""Steps of a stream that are joined, or kept apart for parsers of single tokens."""

from __future__ import annotations

import asyncio

import pytest
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.output_processor import RequestOutputCollector

from gpupoold.frontend import pool_client
from gpupoold.frontend.pool_client import (
    join_steps,
    keep_steps_apart,
    put_in_a_row,
    reads_joined_steps,
)


def delta(token_id: int, *, finished: bool = False) -> RequestOutput:
    completion = CompletionOutput(0, f"{token_id} ", [token_id], None, None)
    return RequestOutput("a", None, [1], None, [completion], finished)


def stream(kind: RequestOutputKind = RequestOutputKind.DELTA) -> RequestOutputCollector:
    return keep_steps_apart(RequestOutputCollector(kind, "a"))


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def steps() -> list[EngineCoreOutputs]:
    return [
        EngineCoreOutputs(outputs=[EngineCoreOutput(name, [i]) for name in "ab"]) for i in range(2)
    ]


async def test_steps_stay_apart() -> None:
    queue = stream()
    for token_id in range(3):
        queue.put(delta(token_id))
    assert [tokens(await queue.get()) for _ in range(2)] == [[0], [1]]
    assert tokens(queue.get_nowait()) == [2]
    assert queue.get_nowait() is None
    reader = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.put(delta(3, finished=True))
    assert tokens(await reader) == [3]


async def test_an_error_comes_before_waiting_steps() -> None:
    queue = stream()
    queue.put(delta(0))
    queue.put(delta(1))
    queue.put(ValueError("lost"))
    queue.put(delta(2))
    with pytest.raises(ValueError, match="lost"):
        await queue.get()
    assert queue.get_nowait() is None


async def test_more_steps_are_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "MAX_STEPS_APART", 2)
    queue = stream()
    for token_id in range(6):
        queue.put(delta(token_id))
    assert [tokens(await queue.get()) for _ in range(3)] == [[0], [1], [2, 3, 4, 5]]


async def test_whole_answers_are_merged_as_before() -> None:
    queue = stream(RequestOutputKind.FINAL_ONLY)
    assert type(queue) is RequestOutputCollector


def test_joined_steps_have_the_tokens_of_each_request_together() -> None:
    joined = join_steps(steps())
    assert [(one.request_id, one.new_token_ids) for one in joined.outputs] == [
        ("a", [0, 1]),
        ("b", [0, 1]),
    ]


def test_steps_in_a_row_keep_their_tokens() -> None:
    joined = put_in_a_row(steps())
    assert [(one.request_id, one.new_token_ids) for one in joined.outputs] == [
        ("a", [0]),
        ("b", [0]),
        ("a", [1]),
        ("b", [1]),
    ]


@pytest.mark.parametrize(
    ("parser", "joins"),
    [(None, True), ("hermes", True), ("qwen3_coder", True), ("llama3_json", False)],
)
def test_which_parsers_take_joined_steps(parser: str | None, joins: bool) -> None:
    assert reads_joined_steps(parser) is joins
