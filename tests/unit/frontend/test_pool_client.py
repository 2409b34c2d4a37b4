"""The engine client: what it sends, and how it reads outputs."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    PrefillStats,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from gpupoold.frontend import pool_client
from gpupoold.frontend.pool_client import EngineLimits, PoolClient, RequestLost
from gpupoold.wire.messages import AbortRequests, AddRequest, RequestProgress, StepOutputs


class ControlPlane:
    """A client whose messages are collected."""

    def __init__(self, *, joins: bool = True) -> None:
        self.sent: list[msgspec.Struct] = []
        self.unreadable: list[list[str]] = []
        self.cached: list[tuple[str, int]] = []
        self.client = PoolClient(
            EngineLimits("m", ("generate",), 0.1, vocab_size=1000, num_embeddings=1010),
            self.sent.append,
            self.unreadable.append,
            lambda *one: self.cached.append(one),
            joins=joins,
        )


def engine_request(**changes: Any) -> EngineCoreRequest:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "sampling_params": SamplingParams(max_tokens=9),
        "mm_features": None,
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
    }
    return EngineCoreRequest(**fields | changes)


def step(*token_ids: int, num_cached: int | None = None) -> StepOutputs:
    """Return a step of request r1; without tokens one that cannot be read."""
    output = EngineCoreOutput("r1", list(token_ids))
    if num_cached is not None:
        output.prefill_stats = PrefillStats(num_cached_tokens=num_cached)
    frames = [bytes(one) for one in MsgpackEncoder().encode(EngineCoreOutputs(outputs=[output]))]
    progress = [RequestProgress("r1", list(token_ids))]
    return StepOutputs("m", 0.0, frames=frames if token_ids else [b"\xff"], progress=progress)


def tokens_of(outputs: EngineCoreOutputs) -> list[list[int]]:
    return [one.new_token_ids for one in outputs.outputs]


def test_cached_tokens_are_told_when_outputs_are_read() -> None:
    plane = ControlPlane()
    plane.client.push(step(5))
    plane.client.push(step(6, num_cached=3))
    asyncio.run(plane.client.get_output_async())
    assert plane.cached == [("r1", 3)]


def test_request_is_sent_with_its_frames() -> None:
    pool = ControlPlane()
    before_s = time.monotonic()
    asyncio.run(pool.client.add_request_async(engine_request()))
    (message,) = pool.sent
    assert isinstance(message, AddRequest)
    received = MsgpackDecoder(EngineCoreRequest).decode(message.frames)
    assert (received.request_id, received.prompt_token_ids) == ("r1", [1, 2])
    assert before_s <= message.arrival_s <= time.monotonic()
    assert msgspec.structs.replace(message, arrival_s=0.0, frames=[]) == AddRequest(
        model="m",
        request_id="r1",
        arrival_s=0.0,
        num_prompt_tokens=2,
        max_tokens=9,
        frames=[],
    )


def test_a_request_of_an_adapter_has_the_name_of_the_adapter() -> None:
    pool = ControlPlane()
    request = engine_request(lora_request=LoRARequest("adapter", 1, "/adapter"))
    asyncio.run(pool.client.add_request_async(request))
    (message,) = pool.sent
    assert isinstance(message, AddRequest)
    assert (message.model, message.served_name, message.counted_name) == ("m", "adapter", "adapter")


def test_only_requests_with_tokens() -> None:
    pool = ControlPlane()
    with pytest.raises(VLLMValidationError):
        asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=None)))
    assert pool.sent == []


def test_tokens_with_a_row_that_no_answer_can_have() -> None:
    """Such tokens are part of a prompt, but nothing counts them."""
    pool = ControlPlane()
    asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=[1, 1005])))
    with pytest.raises(VLLMValidationError, match="Token id 1010 of the prompt is beyond"):
        asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=[1, 1010])))
    counting = engine_request(prompt_token_ids=[1, 1005])
    counting.sampling_params = SamplingParams(max_tokens=9, repetition_penalty=1.1)
    with pytest.raises(VLLMValidationError, match="1005 is beyond the 1,000 that an answer"):
        asyncio.run(pool.client.add_request_async(counting))
    assert len(pool.sent) == 1


def test_a_pooling_request_is_due_one_result() -> None:
    pool = ControlPlane()
    asyncio.run(pool.client.add_request_async(engine_request(sampling_params=None)))
    [sent] = pool.sent
    assert isinstance(sent, AddRequest)
    assert sent.max_tokens == 1


def test_what_no_message_should_carry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_client, "MAX_REQUEST_BYTES", 7)
    pool = ControlPlane()
    with pytest.raises(VLLMValidationError, match=r"takes [0-9]+ bytes .* limit of 7"):
        asyncio.run(pool.client.add_request_async(engine_request()))
    assert pool.sent == []


def test_stopped_client_refuses_with_the_reason() -> None:
    pool = ControlPlane()
    pool.client.stop("gone")
    assert pool.client.stopped
    with pytest.raises(RequestLost, match="gone"):
        asyncio.run(pool.client.add_request_async(engine_request()))


def test_outputs_without_frames_are_made_from_progress() -> None:
    async def run() -> Any:
        pool = ControlPlane()
        progress = [RequestProgress("r1", [5, 6]), RequestProgress("r2", [7], "length")]
        pool.client.push(StepOutputs(model="m", at_s=0.0, frames=[], progress=progress))
        return await pool.client.get_output_async()

    assert tokens_of(asyncio.run(run())) == [[5, 6], [7]]


def test_aborts_are_sent_unless_empty() -> None:
    pool = ControlPlane()
    asyncio.run(pool.client.abort_requests_async([]))
    asyncio.run(pool.client.abort_requests_async(("r1", "r2")))
    assert pool.sent == [AbortRequests(model="m", request_ids=["r1", "r2"])]


def test_unreadable_outputs_are_reported_and_skipped() -> None:
    pool = ControlPlane()
    pool.client.push(step())
    pool.client.push(step(5))
    assert tokens_of(asyncio.run(pool.client.get_output_async())) == [[5]]
    assert pool.unreadable == [["r1"]]


@pytest.mark.parametrize(("joins", "together"), [(True, [[1, 2]]), (False, [[1], [2]])])
def test_steps_that_wait_are_read_as_one_without_those_that_are_unreadable(
    joins: bool, together: list[list[int]]
) -> None:
    async def run() -> list[Any]:
        pool = ControlPlane(joins=joins)
        for one in (step(1), step(), step(2)):
            pool.client.push(one)
        found = tokens_of(await pool.client.get_output_async())
        pool.client.push(step(3))
        return [found, tokens_of(await pool.client.get_output_async()), pool.unreadable]

    assert asyncio.run(run()) == [together, [[3]], [["r1"]]]


def test_other_engine_operations_are_named() -> None:
    with pytest.raises(AttributeError, match="sleep_async is not available through gpupool"):
        ControlPlane().client.sleep_async()
