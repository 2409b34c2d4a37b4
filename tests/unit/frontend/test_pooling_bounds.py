"""Bounds on the texts of pooling requests."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpupoold.frontend.pooling_bounds import bound_pooling, why_too_long
from gpupoold.frontend.prompt_bounds import MAX_PROMPT_TOKENS


class Refused(Exception):
    pass


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

    scores = SimpleNamespace(io_processor=processor(), _prepare_generators=prepare)
    pooling = SimpleNamespace(
        io_processors={"embed": processor()}, io_processor=None, _prepare_generators=prepare
    )
    return SimpleNamespace(serving_scores=scores, serving_pooling=pooling), prepared


@pytest.mark.parametrize("length", [65_536, 65_537])
def test_handlers_check_texts_before_tokenisation(length: int) -> None:
    inputs = [{"prompts": {"prompt": "x" * length}}]
    state, _ = handlers(inputs)
    bound_pooling(state, 512, Refused)
    for one in (state.serving_scores.io_processor, state.serving_pooling.io_processors["embed"]):
        if length == 65_536:
            assert one.get_request_factory_online(None) == inputs
        else:
            with pytest.raises(Refused, match="65,537 characters"):
                one.get_request_factory_online(None)


@pytest.mark.parametrize("extra", [0, 1])
def test_handlers_count_tokens_before_the_first_request(extra: int) -> None:
    state, prepared = handlers([])
    bound_pooling(state, 512, Refused)
    half = [0] * (MAX_PROMPT_TOKENS // 2)
    lengths = [half, half, [0] * extra]
    inputs = [{"prompts": {"prompt_token_ids": one}} for one in lengths]
    context = SimpleNamespace(engine_inputs=inputs)
    if extra:
        with pytest.raises(Refused, match="1,048,577 tokens in all"):
            asyncio.run(state.serving_scores._prepare_generators(context))
        assert prepared == []
    else:
        asyncio.run(state.serving_scores._prepare_generators(context))
        assert prepared == [context]
