"""Prompts that are refused before they cost anything."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from vllm.exceptions import VLLMValidationError

from gpupoold.frontend.request_context import RequestTally, counts
from gpupoold.frontend.vllm_bounds import MAX_PROMPT_TOKENS, bound_renderer, check_words


def renderer(max_model_len: int) -> Any:
    """One whose tokeniser makes a token of each character."""

    async def tokenize(prompt: Any, params: object) -> Any:
        return {"prompt_token_ids": [1] * len(prompt["prompt"])}

    async def process(prompt: Any, arrival_s: float) -> Any:
        return prompt

    made = SimpleNamespace(
        _tokenize_prompt_async=tokenize,
        _tokenize_prompt=lambda prompt, params: {"prompt_token_ids": [1]},
        process_for_engine_async=process,
    )
    bound_renderer(made, max_model_len)
    return made


def test_long_texts_are_not_tokenised() -> None:
    made = renderer(100_000)
    prompt = {"prompt": "x" * 800_000}
    assert asyncio.run(made._tokenize_prompt_async(prompt, None))
    with pytest.raises(VLLMValidationError, match="800,001 characters, more than the 800,000"):
        asyncio.run(made._tokenize_prompt_async({"prompt": "x" * 800_001}, None))
    assert made._tokenize_prompt(prompt, None)
    with pytest.raises(VLLMValidationError, match="800,001 characters, more than the 800,000"):
        made._tokenize_prompt({"prompt": "x" * 800_001}, None)
    short = renderer(16)
    assert asyncio.run(short._tokenize_prompt_async({"prompt": "x" * 65_536}, None))


@pytest.mark.parametrize(
    ("num_samples", "lengths", "is_refused"),
    [
        (1, [MAX_PROMPT_TOKENS], False),
        (1, [MAX_PROMPT_TOKENS, 1], True),
        (128, [8192], False),
        (128, [8193], True),
        (2, [1 << 18, 1 << 18], False),
        (2, [1 << 18, 1 << 18, 1], True),
    ],
)
def test_all_prompts_of_a_request_count(
    num_samples: int, lengths: list[int], is_refused: bool
) -> None:
    made = renderer(131_072)

    async def render() -> None:
        with counts.holding(RequestTally(1, num_samples, asyncio.Semaphore())):
            for length in lengths:
                prompt = {"prompt_token_ids": [1] * length}
                await asyncio.create_task(made.process_for_engine_async(prompt, 0.0))

    if is_refused:
        with pytest.raises(VLLMValidationError, match="1,048,576 tokens in all"):
            asyncio.run(render())
    else:
        asyncio.run(render())


def test_a_long_context_takes_one_such_prompt() -> None:
    made = renderer(2 * MAX_PROMPT_TOKENS)
    with counts.holding(RequestTally(1, 1, asyncio.Semaphore())):
        prompt = {"prompt_token_ids": [1] * (2 * MAX_PROMPT_TOKENS)}
        assert asyncio.run(made.process_for_engine_async(prompt, 0.0)) is prompt


def test_words() -> None:
    for words in (None, [], ["x" * 8192] * 2):
        check_words(SimpleNamespace(stop=words))
    with pytest.raises(VLLMValidationError, match="`stop` has 16,385 characters"):
        check_words(SimpleNamespace(stop=["x" * 16_385]))


def exponential() -> Any:
    """A renderer whose tokenizer has too many ways to match a repeated letter."""
    tokenizer = Tokenizer(WordLevel({"x": 0}, unk_token="x"))
    tokenizer.pre_tokenizer = Split(Regex("(x+x+)+y"), "isolated")

    def tokenize(prompt: Any) -> Any:
        return {"prompt_token_ids": tokenizer.encode(prompt["prompt"]).ids}

    async def tokenize_async(prompt: Any) -> Any:
        return tokenize(prompt)

    made = SimpleNamespace(
        _tokenize_prompt_async=tokenize_async,
        _tokenize_prompt=tokenize,
        process_for_engine_async=None,
    )
    bound_renderer(made, 100_000)
    return made


def test_texts_at_which_the_tokenizer_fails_are_refused() -> None:
    made = exponential()
    with pytest.raises(VLLMValidationError, match="The tokenizer of this model fails at this text"):
        asyncio.run(made._tokenize_prompt_async({"prompt": "x" * 3000}))
    with pytest.raises(VLLMValidationError, match="The tokenizer of this model fails at this text"):
        made._tokenize_prompt({"prompt": "x" * 3000})
    assert made._tokenize_prompt({"prompt": "x"})


def test_other_errors_of_the_tokenizer_pass() -> None:
    def fail(prompt: Any) -> Any:
        raise KeyError(prompt["prompt"])

    made = SimpleNamespace(
        _tokenize_prompt_async=None, _tokenize_prompt=fail, process_for_engine_async=None
    )
    bound_renderer(made, 100)
    with pytest.raises(KeyError, match="text"):
        made._tokenize_prompt({"prompt": "text"})
