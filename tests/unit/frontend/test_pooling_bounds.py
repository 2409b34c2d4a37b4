"""Bounds on the texts of pooling requests."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError

from gpupoold.frontend.conversations import without_token_ids
from gpupoold.frontend.request_context import BytesInFlight, RequestTally, counts
from gpupoold.frontend.vllm_bounds import (
    MAX_NUMBERS,
    MAX_PROMPT_TOKENS,
    bound_pooling,
    input_slot,
    why_too_long,
)

HIDDEN_SIZE = 16


def context_of(inputs: Any, **params: Any) -> Any:
    """vLLM's context of a request for these inputs."""
    params = {"task": "embed", "dimensions": None} | params
    return SimpleNamespace(
        engine_inputs=inputs,
        pooling_params=SimpleNamespace(**params),
        request=SimpleNamespace(encoding_format="float"),
    )


LONG = 65_537  # one more than is always tokenised


def test_each_text_and_all_texts_are_bounded() -> None:
    assert why_too_long([{"prompts": {"prompt": "x" * 65_536}}, {"prompts": b"raw"}], 512) == ""
    assert why_too_long([{"prompts": {"prompt_token_ids": [1] * 99}}], 10) == ""
    assert "65,537 characters" in why_too_long([{"prompts": {"prompt": "x" * LONG}}], 512)
    assert "65,537 characters" in why_too_long([{"data_1": "q", "data_2": "x" * LONG}], 512)
    assert why_too_long([{"data_1": "q", "data_2": "x" * LONG}], 8_193) == ""
    # A query counts once per document.
    query = "q" * 60_000
    pairs = [{"data_1": query, "data_2": "d"}] * 139
    assert why_too_long(pairs, 512) == ""
    assert "a query counted once per document" in why_too_long([*pairs, pairs[0]], 512)


def test_padding_is_bounded() -> None:
    padded = [{"tok_params": SimpleNamespace(pad_prompt_tokens=-1)}] * 129
    assert why_too_long(padded[:128], 8192) == ""
    assert "129 inputs padded to 8,192 tokens" in why_too_long(padded, 8192)
    assert why_too_long(padded[:1], 2 * MAX_PROMPT_TOKENS) == ""
    plain = [{"tok_params": SimpleNamespace(pad_prompt_tokens=None)}] * 129
    assert why_too_long(plain, 8192) == ""


def handlers(inputs: list[dict[str, Any]]) -> tuple[Any, list[Any]]:
    """vLLM's state with two handlers, and the contexts that went on."""
    prepared: list[Any] = []

    async def prepare(context: Any) -> None:
        prepared.append(context)

    def processor() -> Any:
        return SimpleNamespace(get_request_factory_online=lambda _: inputs)

    async def begin(processor: Any, request: Any) -> Any:
        return SimpleNamespace(request=request)

    model_config = SimpleNamespace(get_hidden_size=lambda: HIDDEN_SIZE)
    common = {"_prepare_generators": prepare, "_init_ctx": begin, "model_config": model_config}
    scores = SimpleNamespace(io_processor=processor(), **common)
    pooling = SimpleNamespace(io_processors={"embed": processor()}, io_processor=None, **common)
    return SimpleNamespace(serving_scores=scores, serving_pooling=pooling), prepared


@pytest.mark.parametrize("length", [65_536, 65_537])
def test_handlers_check_texts_before_tokenisation(length: int) -> None:
    inputs = [{"prompts": {"prompt": "x" * length}}]
    state, _ = handlers(inputs)
    bound_pooling(state, 512)
    for one in (state.serving_scores.io_processor, state.serving_pooling.io_processors["embed"]):
        if length == 65_536:
            assert one.get_request_factory_online(None) == inputs
        else:
            with pytest.raises(VLLMValidationError, match="65,537 characters"):
                one.get_request_factory_online(None)


@pytest.mark.parametrize("extra", [0, 1])
def test_handlers_count_tokens_before_the_first_request(extra: int) -> None:
    state, prepared = handlers([])
    bound_pooling(state, 512)
    half = [0] * (MAX_PROMPT_TOKENS // 2)
    lengths = [half, half, [0] * extra]
    inputs = [{"prompts": {"prompt_token_ids": one}} for one in lengths]
    context = context_of(inputs)
    if extra:
        with pytest.raises(VLLMValidationError, match="1,048,577 tokens in all"):
            asyncio.run(state.serving_scores._prepare_generators(context))
        assert prepared == []
    else:
        asyncio.run(state.serving_scores._prepare_generators(context))
        assert prepared == [context]


@pytest.mark.parametrize(
    ("task", "dimensions", "num_inputs", "is_refused"),
    [
        ("embed", None, MAX_NUMBERS // HIDDEN_SIZE, False),
        ("embed", None, MAX_NUMBERS // HIDDEN_SIZE + 1, True),
        ("embed", 4, MAX_NUMBERS // HIDDEN_SIZE + 1, False),
        ("token_embed", None, MAX_NUMBERS // HIDDEN_SIZE // 2 + 1, True),
        ("classify", None, MAX_NUMBERS // HIDDEN_SIZE + 1, False),
    ],
)
def test_results_are_counted_and_charged(
    task: str, dimensions: int | None, num_inputs: int, is_refused: bool
) -> None:
    """Each input has two tokens, and tasks by token have a result for each token."""
    state, prepared = handlers([])
    bound_pooling(state, 512)
    inputs: list[Any] = [{"prompts": {"prompt_token_ids": []}}] * num_inputs
    if task.startswith("token"):
        inputs = [{"prompts": {"prompt_token_ids": [1, 2]}}] * num_inputs
    context = context_of(inputs, task=task, dimensions=dimensions)
    room = BytesInFlight(1 << 40)
    with room.holding(""):
        if is_refused:
            with pytest.raises(VLLMValidationError, match="more than 8,388,608"):
                asyncio.run(state.serving_scores._prepare_generators(context))
        else:
            asyncio.run(state.serving_scores._prepare_generators(context))
            assert prepared == [context]
            assert room.num_bytes > 0


@pytest.mark.parametrize("ids", [[5] * 3000, [[5] * 60] * 1000])
def test_token_ids_pass_vllm_s_validator_by(ids: Any) -> None:
    state, _ = handlers([])
    bound_pooling(state, 512)
    body, token_ids = without_token_ids(json.dumps({"model": "m", "input": ids}).encode())
    assert json.loads(body) == {"model": "m", "input": [0]}
    with counts.holding(RequestTally(1, 1, asyncio.Semaphore(4), token_ids=token_ids)):
        request = SimpleNamespace(input=[0])
        made = asyncio.run(state.serving_pooling._init_ctx(None, request))
    assert made.request.input == ids


@pytest.mark.parametrize("value", ["x" * 5000, ["x" * 9] * 999, [1.5] * 3000, {"a": [1] * 3000}])
def test_other_inputs_are_left_in_the_body(value: Any) -> None:
    body = json.dumps({"input": value}).encode()
    assert without_token_ids(body) == (body, None)


def test_some_inputs_at_a_time_are_in_the_engine() -> None:
    most, now = 0, 0

    async def one() -> None:
        nonlocal most, now
        async with input_slot():
            now += 1
            most = max(most, now)
            await asyncio.sleep(0)
            now -= 1

    async def run() -> None:
        with counts.holding(RequestTally(1, 1, asyncio.Semaphore(4))):
            await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(run())
    assert most == 4
