"""Tokens of a vocabulary: ids beyond the model's rows, texts, and log-probabilities of prompts.

A tokenizer may have more tokens than the model has rows: on purpose, as for placeholders of images,
or because its files belong to another model. vLLM takes the larger of the two as the bound of a
prompt, and the step that looks up such a row ends the worker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import vllm.v1.engine.logprobs as engine_logprobs
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.engine.output_processor import RequestState

from gpupoold.equal_tokenizers import vocabulary_of

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"
_IN_ONE_PIECE = 1_000
_decode = engine_logprobs.convert_ids_list_to_tokens
_correct = LogprobsProcessor._correct_decoded_token
_texts: WeakKeyDictionary[Any, dict[int, str]] = WeakKeyDictionary()
_decoding: WeakKeyDictionary[Any, asyncio.Task[None]] = WeakKeyDictionary()

_ROWS = 16
"""Positions of a prompt between two looks at the clock."""
_SLICE_S = 0.005


def num_embeddings(config: Any) -> int:
    """Return the number of tokens that a model has rows for; ``config`` is vLLM's ModelConfig."""
    more = 0
    match config.hf_config.model_type:  # rows for tokens around images
        case "molmo":
            more = 128
        case "molmo2":
            more = int(config.hf_text_config.additional_vocab_size or 0)
    return int(config.get_vocab_size()) + more


def take_rows(request: Any, num_rows: int) -> int | None:
    """Give the tokens that an image or the like replaces numbers that the model has rows for.

    Most of vLLM's models look a replaced token up before they write the image's embedding over it,
    and the penalties and log-probabilities of a prompt count it. The number is the prompt's first
    with a row, which penalties count already. Returns a token without a row that nothing replaces;
    None if there is none.
    """
    token_ids = request.prompt_token_ids
    if not token_ids or max(token_ids) < num_rows:
        return None
    replaced: set[int] = set()
    for feature in request.mm_features or ():
        where = feature.mm_position
        mask = [True] * where.length if where.is_embed is None else where.is_embed.tolist()
        replaced.update(
            where.offset + index for index, is_replaced in enumerate(mask) if is_replaced
        )
    stand_in = next((token_id for token_id in token_ids if token_id < num_rows), 0)
    taken = [
        stand_in if token_id >= num_rows and at in replaced else token_id
        for at, token_id in enumerate(token_ids)
    ]
    request.prompt_token_ids = taken  # the answer shows the list as it was
    return next((token_id for token_id in taken if token_id >= num_rows), None)


def counts_prompt(params: Any) -> bool:
    """Return whether a request's sampling reads columns of the logits for its prompt's tokens."""
    has_penalty = params.repetition_penalty != 1 or params.presence_penalty
    return bool(has_penalty or params.frequency_penalty) or params.prompt_logprobs is not None


def drop_beyond(params: Any, vocab_size: int) -> None:
    """Drop what no answer can contain from the tokens that ``min_tokens`` and ``bad_words`` mask.

    They are columns of the logits, and some are the checkpoint's own, which vLLM does not check.
    """
    stops: set[int] = params.all_stop_token_ids
    beyond = {stop for stop in stops if not 0 <= stop < vocab_size}
    if beyond:
        stops -= beyond
        # The worker makes the set again of these.
        params.stop_token_ids = [
            token_id for token_id in params.stop_token_ids if token_id not in beyond
        ]
    if params.bad_words_token_ids:
        params._bad_words_token_ids = [
            word for word in params.bad_words_token_ids if max(word, default=0) < vocab_size
        ]


def decode_tokens_once() -> None:
    """Make vLLM's processors of log-probabilities use the texts; may be called again.

    vLLM decodes each token of each position anew, in 5 to 10 µs, and tries each token that is a
    part of a character with up to four tokens before it.
    """
    engine_logprobs.convert_ids_list_to_tokens = texts_of
    LogprobsProcessor._correct_decoded_token = _corrected  # type: ignore[method-assign, unused-ignore]


async def prepare_texts(tokenizer: Any) -> None:
    """Decode the vocabulary in a thread, unless done: 100,000 tokens take most of a second."""
    if tokenizer is None:
        return
    vocabulary = vocabulary_of(tokenizer)
    if vocabulary not in _decoding:
        _decoding[vocabulary] = asyncio.create_task(asyncio.to_thread(_decode_all, vocabulary))
    if not _decoding[vocabulary].done():
        await asyncio.shield(_decoding[vocabulary])


def texts_of(tokenizer: Any, token_ids: list[int]) -> list[str]:
    """Return the text of each token alone, as vLLM's function of this signature."""
    texts = _texts.setdefault(vocabulary_of(tokenizer), {})
    missing = [token for token in dict.fromkeys(token_ids) if token not in texts]
    if missing:
        texts.update(zip(missing, _decode(tokenizer, missing), strict=True))
    return [texts[token_id] for token_id in token_ids]


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


def has_logprobs(params: object) -> bool:
    """Return whether a request asks for log-probabilities; pooling requests never do."""
    if not isinstance(params, SamplingParams):
        return False
    return params.num_logprobs is not None or params.prompt_logprobs is not None


class PromptLogprobs:
    """Outputs that are held back until their log-probabilities are made.

    ``states`` are the requests of vLLM's output processor, by engine request.

    vLLM makes the log-probabilities of a step in one piece on the event loop: four prompts of 1,000
    tokens with 20 alternatives each take 0.2 s, and more where tokens end within a character.
    """

    def __init__(self, states: Mapping[str, RequestState]) -> None:
        self._states = states
        self._held: dict[str, list[EngineCoreOutput]] = {}  # in the order of the next slices

    def __bool__(self) -> bool:
        """Whether outputs are held back."""
        return bool(self._held)

    def hold(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        """Hold back outputs with a prompt's log-probabilities, and later ones of their requests.

        Returns the others.
        """
        others = []
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is not None:
                held.append(output)
            elif output.new_prompt_logprobs_tensors is not None:
                self._held[output.request_id] = [output]
            else:
                others.append(output)
        return others

    def advance(self) -> list[EngineCoreOutput]:
        """Make the next slice of a request; return the request's outputs if that was the last."""
        request_id = next(iter(self._held))
        outputs = self._held.pop(request_id)
        state = self._states.get(request_id)
        if state is None or state.logprobs_processor is None:  # the client has left
            return outputs
        until_s = time.monotonic() + _SLICE_S
        while (tensors := outputs[0].new_prompt_logprobs_tensors) is not None:
            state.logprobs_processor._update_prompt_logprobs(_rows(tensors, slice(_ROWS)))
            rest = _rows(tensors, slice(_ROWS, None))
            outputs[0].new_prompt_logprobs_tensors = rest if len(rest.logprobs) else None
            if time.monotonic() >= until_s:
                break
        if outputs[0].new_prompt_logprobs_tensors is None:
            return outputs
        self._held[request_id] = outputs
        return []


def _rows(tensors: Any, rows: slice) -> Any:
    """Return the positions of vLLM's ``LogprobsTensors``."""
    return type(tensors)(
        tensors.logprob_token_ids[rows], tensors.logprobs[rows], tensors.selected_token_ranks[rows]
    )
