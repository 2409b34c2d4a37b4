"""The texts of tokens, decoded once, are those of vLLM."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from transformers import AutoTokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from gpupoold.frontend import vocabulary


@pytest.fixture(scope="module")
def tokenizer(tiny_models: dict[str, Path]) -> Any:
    return AutoTokenizer.from_pretrained(tiny_models["tiny-llama"])


@pytest.fixture
def counted(tokenizer: Any) -> Iterator[list[int]]:
    """The ids decoded by vLLM's function, of a tokenizer that is not known yet."""
    vocabulary._texts.pop(tokenizer, None)
    vocabulary._decoding.pop(tokenizer, None)
    decoded: list[int] = []
    decode = vocabulary._decode

    def counting(of: Any, token_ids: list[int]) -> list[str]:
        decoded.extend(token_ids)
        return decode(of, token_ids)

    with patch.object(vocabulary, "_decode", counting):
        yield decoded


def test_each_token_is_decoded_once(tokenizer: Any, counted: list[int]) -> None:
    ids = [5, 9, 5, 5, 300]
    alone = [vocabulary._decode(tokenizer, [one])[0] for one in ids]
    counted.clear()
    assert vocabulary.texts_of(tokenizer, ids) == alone
    assert vocabulary.texts_of(tokenizer, ids) == alone
    assert counted == [5, 9, 300]


def test_the_vocabulary_is_decoded_before(tokenizer: Any, counted: list[int]) -> None:
    async def run() -> None:
        await asyncio.gather(*(vocabulary.prepare_texts(tokenizer) for _ in range(3)))

    asyncio.run(run())
    assert sorted(counted) == list(range(len(tokenizer)))
    vocabulary.texts_of(tokenizer, list(range(len(tokenizer))))
    assert len(counted) == len(tokenizer)


def test_parts_of_characters_are_corrected_as_by_vllm(tokenizer: Any) -> None:
    texts = vocabulary.texts_of(tokenizer, list(range(len(tokenizer))))
    parts = [number for number, text in enumerate(texts) if text.endswith("\ufffd")]
    assert len(parts) > 50  # the bytes that begin or continue a character
    chosen = random.Random(1)
    processor = LogprobsProcessor(tokenizer, None, None, None, None, None)
    for _ in range(3_000):
        pool = parts if chosen.random() < 0.7 else range(len(tokenizer))
        context = [chosen.choice(pool) for _ in range(chosen.randrange(5))]
        token = chosen.choice(parts)
        expected = vocabulary._correct(processor, token, context)
        assert vocabulary._corrected(processor, token, context) == expected, (context, token)
