"""The texts of single tokens, for log-probabilities, decoded once per tokenizer.

vLLM decodes each token of each position anew, in 5 to 10 µs, and tries each token that is a part of
a character with up to four tokens before it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any
from weakref import WeakKeyDictionary

import vllm.v1.engine.logprobs as engine_logprobs
from vllm.v1.engine.logprobs import LogprobsProcessor

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_IN_ONE_PIECE = 1_000
_decode = engine_logprobs.convert_ids_list_to_tokens
_correct = LogprobsProcessor._correct_decoded_token
_texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
_decoding: WeakKeyDictionary[Any, asyncio.Task[None]] = WeakKeyDictionary()


def decode_tokens_once() -> None:
    """Make vLLM's processors of log-probabilities use the texts; may be called again."""
    engine_logprobs.convert_ids_list_to_tokens = texts_of
    LogprobsProcessor._correct_decoded_token = _corrected  # type: ignore[method-assign, unused-ignore]


async def prepare_texts(tokenizer: Any) -> None:
    """Decode the vocabulary in a thread, unless done: 100,000 tokens take most of a second."""
    if tokenizer is None:
        return
    if tokenizer not in _decoding:
        _decoding[tokenizer] = asyncio.create_task(asyncio.to_thread(_decode_all, tokenizer))
    if not _decoding[tokenizer].done():
        await asyncio.shield(_decoding[tokenizer])


def texts_of(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return the text of each token alone, as vLLM's function of this signature."""
    texts = _texts.setdefault(tokenizer, {})
    missing = [one for one in dict.fromkeys(token_ids) if one not in texts]
    if missing:
        texts.update(zip(missing, _decode(tokenizer, missing), strict=True))
    return [texts[one] for one in token_ids]


def _decode_all(tokenizer: Any) -> None:
    for begin in range(0, len(tokenizer), _IN_ONE_PIECE):
        # A number without a token is decoded, or refused, with the request that has it.
        with contextlib.suppress(Exception):
            texts_of(tokenizer, list(range(begin, min(begin + _IN_ONE_PIECE, len(tokenizer)))))


def _corrected(self: LogprobsProcessor, token_id: int, context_token_ids: list[int]) -> str:
    """Return the text that a part of a character completes, after the tokens of its context.

    After a token that ends with a whole character, the part stays a part: vLLM would find the same
    with up to four calls of the tokenizer.
    """
    if not context_token_ids:
        return ""
    [before] = texts_of(self.tokenizer, context_token_ids[-1:])
    if not before.endswith(_PART_OF_A_CHARACTER):
        return ""
    corrected: str = _correct(self, token_id, context_token_ids)
    return corrected
