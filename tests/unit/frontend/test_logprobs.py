"""Log-probabilities of prompts in slices: the same as vLLM's, in order, between other outputs."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.logprobs import create_prompt_logprobs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from gpupoold.frontend import vocabulary
from gpupoold.frontend.vocabulary import PromptLogprobs

WIDTH = 4


class Words:
    """A tokenizer of one word per token; every third ends within a character."""

    def convert_ids_to_tokens(self, ids: list[int], **_: Any) -> list[str]:
        return [self.decode([one]) for one in ids]

    def decode(self, ids: Any, **_: Any) -> str:
        ids = [ids] if isinstance(ids, int) else ids
        return "".join("�" if one % 3 == 0 and len(ids) == 1 else f"w{one}" for one in ids)


def processor() -> LogprobsProcessor:
    tokenizer: Any = Words()
    return LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=None,
        prompt_logprobs=create_prompt_logprobs(False),
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=WIDTH - 1,
    )


def tensors(num_rows: int) -> LogprobsTensors:
    ids = torch.arange(num_rows * WIDTH, dtype=torch.int32).reshape(num_rows, WIDTH) % 97
    return LogprobsTensors(ids, -ids.float() / 7, torch.arange(num_rows) % 5)


def first_output(name: str, num_rows: int) -> EngineCoreOutput:
    output = EngineCoreOutput(name, [1])
    output.new_prompt_logprobs_tensors = tensors(num_rows)
    return output


@pytest.mark.parametrize("num_rows", [1, 15, 16, 17, 100])
def test_slices_make_the_same(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_SLICE_S", 0.0)
    whole, sliced = processor(), processor()
    whole._update_prompt_logprobs(tensors(num_rows))
    slow = PromptLogprobs({"a": SimpleNamespace(logprobs_processor=sliced)})  # type: ignore[dict-item]
    assert slow.hold([first_output("a", num_rows)]) == []
    num_slices, due = 0, []
    while slow:
        due = slow.advance()
        num_slices += 1
    assert num_slices == -(-num_rows // 16)
    assert [one.request_id for one in due] == ["a"]
    assert due[0].new_prompt_logprobs_tensors is None
    assert sliced.prompt_logprobs == whole.prompt_logprobs


def test_requests_advance_in_turns_and_their_outputs_stay_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vocabulary, "_SLICE_S", 0.0)
    states: Any = {name: SimpleNamespace(logprobs_processor=processor()) for name in "ab"}
    slow = PromptLogprobs(states)
    other = EngineCoreOutput("c", [5])
    assert slow.hold([first_output("a", 40), other, first_output("b", 16)]) == [other]
    later = EngineCoreOutput("a", [2])
    assert slow.hold([later]) == []
    due = [[one.request_id for one in slow.advance()] for _ in range(4)]
    assert due == [[], ["b"], [], ["a", "a"]]
    assert not slow
    assert slow.hold([later]) == [later]


def test_outputs_of_a_client_that_has_left_are_given_back() -> None:
    slow = PromptLogprobs({})
    slow.hold([first_output("gone", 1000), EngineCoreOutput("gone", [2])])
    assert [one.request_id for one in slow.advance()] == ["gone", "gone"]
    assert not slow


def test_other_outputs_overtake_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.unit.frontend.test_pool_client import ControlPlane

    monkeypatch.setattr(vocabulary, "_SLICE_S", 0.0)
    plane: Any = ControlPlane()
    client = plane.client
    states: Any = {"a": SimpleNamespace(logprobs_processor=processor())}
    client.slow_outputs = PromptLogprobs(states)
    client._read = lambda outputs: outputs
    client._steps.put_nowait(EngineCoreOutputs(outputs=[first_output("a", 40)]))

    async def read() -> list[list[str]]:
        found = []
        client._steps.put_nowait(EngineCoreOutputs(outputs=[]))
        first = asyncio.create_task(client.get_output_async())
        while not client.slow_outputs:
            await asyncio.sleep(0)
        client._steps.put_nowait(EngineCoreOutputs(outputs=[EngineCoreOutput("b", [1])]))
        found.append([one.request_id for one in (await first).outputs])
        found.append([one.request_id for one in (await client.get_output_async()).outputs])
        return found

    assert asyncio.run(read()) == [["b"], ["a"]]
