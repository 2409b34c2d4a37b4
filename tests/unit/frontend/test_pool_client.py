"""The engine client: what it sends, and how it reads outputs."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from gpupoold.frontend import pool_client
from gpupoold.frontend.pool_client import EngineCodec, EngineLimits, PoolClient
from gpupoold.wire.messages import AbortRequests, AddRequest, RequestProgress, StepOutputs


class Unavailable(Exception):
    pass


class Unsupported(Exception):
    pass


class ControlPlane:
    """A client whose messages are collected; frames are the text itself."""

    def __init__(self) -> None:
        self.sent: list[msgspec.Struct] = []
        self.unreadable: list[list[str]] = []
        codec = EngineCodec(
            encode=lambda request: [request.request_id.encode(), memoryview(b"tensor")],
            decode=lambda frames: frames[0].decode("ascii"),
            make_outputs=lambda progress: [one.new_token_ids for one in progress],
            repeat=lambda request, so_far: so_far.token_ids,
            join=list,
            cached_tokens=lambda outputs: [("r1", 3)] if "cached" in outputs else [],
            put_in_step=lambda outputs: SimpleNamespace(outputs=outputs),
            is_streamed=lambda request: True,
            unavailable=Unavailable,
            unsupported=Unsupported,
        )
        self.cached: list[tuple[str, int]] = []
        self.client = PoolClient(
            EngineLimits("m", ("generate",), 0.1, vocab_size=1000, num_embeddings=1010),
            codec,
            self.sent.append,
            self.unreadable.append,
            lambda *one: self.cached.append(one),
        )


def engine_request(**changes: Any) -> SimpleNamespace:
    fields: dict[str, Any] = {
        "request_id": "r1",
        "prompt_token_ids": [1, 2],
        "sampling_params": SimpleNamespace(
            max_tokens=9,
            all_stop_token_ids=set(),
            bad_words_token_ids=None,
            repetition_penalty=1.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            prompt_logprobs=None,
        ),
        "mm_features": None,
        "lora_request": None,
        "cache_salt": None,
    }
    return SimpleNamespace(**fields | changes)


def step(frame: bytes) -> StepOutputs:
    progress = [RequestProgress("r1", [5])]
    return StepOutputs(model="m", at_s=0.0, frames=[frame], progress=progress)


def test_cached_tokens_are_told_when_outputs_are_read() -> None:
    plane = ControlPlane()
    plane.client.push(step(b"plain"))
    plane.client.push(step(b"cached"))
    asyncio.run(plane.client.get_output_async())
    assert plane.cached == [("r1", 3)]


def test_request_is_sent_with_its_frames() -> None:
    pool = ControlPlane()
    before_s = time.monotonic()
    asyncio.run(pool.client.add_request_async(engine_request()))
    (message,) = pool.sent
    assert isinstance(message, AddRequest)
    assert before_s <= message.arrival_s <= time.monotonic()
    assert msgspec.structs.replace(message, arrival_s=0.0) == AddRequest(
        model="m",
        request_id="r1",
        arrival_s=0.0,
        num_prompt_tokens=2,
        max_tokens=9,
        frames=[b"r1", b"tensor"],
    )


def test_a_request_of_an_adapter_has_the_name_of_the_adapter() -> None:
    pool = ControlPlane()
    request = engine_request(lora_request=SimpleNamespace(lora_name="adapter"))
    asyncio.run(pool.client.add_request_async(request))
    (message,) = pool.sent
    assert isinstance(message, AddRequest)
    assert (message.model, message.served_name, message.counted_name) == ("m", "adapter", "adapter")


def test_only_requests_with_tokens() -> None:
    pool = ControlPlane()
    with pytest.raises(Unsupported):
        asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=None)))
    assert pool.sent == []


def test_tokens_with_a_row_that_no_answer_can_have() -> None:
    """Such tokens are part of a prompt, but nothing counts them."""
    pool = ControlPlane()
    asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=[1, 1005])))
    with pytest.raises(Unsupported, match="Token id 1010 of the prompt is beyond"):
        asyncio.run(pool.client.add_request_async(engine_request(prompt_token_ids=[1, 1010])))
    counting = engine_request(prompt_token_ids=[1, 1005])
    counting.sampling_params.repetition_penalty = 1.1
    with pytest.raises(Unsupported, match="token id 1005 is beyond the 1,000 that an answer"):
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
    with pytest.raises(Unsupported, match=r"takes 8 bytes .* limit of 7"):
        asyncio.run(pool.client.add_request_async(engine_request()))
    assert pool.sent == []


def test_stopped_client_refuses_with_the_reason() -> None:
    pool = ControlPlane()
    pool.client.stop("gone")
    assert pool.client.stopped
    with pytest.raises(Unavailable, match="gone"):
        asyncio.run(pool.client.add_request_async(engine_request()))


def test_outputs_without_frames_are_made_from_progress() -> None:
    async def run() -> Any:
        pool = ControlPlane()
        progress = [RequestProgress("r1", [5, 6]), RequestProgress("r2", [7], "length")]
        pool.client.push(StepOutputs(model="m", at_s=0.0, frames=[], progress=progress))
        return await pool.client.get_output_async()

    assert asyncio.run(run()) == [[5, 6], [7]]


def test_aborts_are_sent_unless_empty() -> None:
    pool = ControlPlane()
    asyncio.run(pool.client.abort_requests_async([]))
    asyncio.run(pool.client.abort_requests_async(("r1", "r2")))
    assert pool.sent == [AbortRequests(model="m", request_ids=["r1", "r2"])]


def test_unreadable_outputs_are_reported_and_skipped() -> None:
    pool = ControlPlane()
    pool.client.push(step(b"\xff"))
    pool.client.push(step(b"fine"))
    assert asyncio.run(pool.client.get_output_async()) == "fine"
    assert pool.unreadable == [["r1"]]


def test_steps_that_wait_are_read_as_one_without_those_that_are_unreadable() -> None:
    async def run() -> list[Any]:
        pool = ControlPlane()
        for frame in (b"one", b"\xff", b"two"):
            pool.client.push(step(frame))
        together = await pool.client.get_output_async()
        pool.client.push(step(b"three"))
        return [together, await pool.client.get_output_async(), pool.unreadable]

    assert asyncio.run(run()) == [["one", "two"], "three", [["r1"]]]


def test_other_engine_operations_are_named() -> None:
    with pytest.raises(AttributeError, match="sleep_async is not available through gpupool"):
        ControlPlane().client.sleep_async()
