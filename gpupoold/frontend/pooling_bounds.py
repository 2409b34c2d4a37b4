"""Bounds on the texts of pooling requests, before and after tokenisation.

vLLM tokenises the inputs of a pooling request itself, each in a thread; a query is tokenised again
with every document.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from gpupoold.frontend.in_flight import charge
from gpupoold.frontend.json_pieces import PiecewiseJson
from gpupoold.frontend.pooling_inputs import put_token_ids_back
from gpupoold.frontend.prompt_bounds import (
    MAX_CHARS_PER_TOKEN,
    MAX_PROMPT_TOKENS,
    Raise,
    max_prompt_chars,
)

MAX_NUMBERS = 2_048 * 4_096
"""Limit of the numbers in all results of one request: OpenAI's inputs in 4,096 dimensions."""
_BY_TOKEN = frozenset({"token_embed", "token_classify"})
_OF_CLASSES = frozenset({"classify", "token_classify"})
_BYTES = 8
"""The memory of a number, with the engine's message; texts of numbers are made while sent."""
_LISTED_BYTES = 64
"""The same where vLLM lists all numbers before any is sent."""
_MAX_CHARS = MAX_CHARS_PER_TOKEN * MAX_PROMPT_TOKENS
# vLLM's handlers in the state of its application.
_HANDLERS = ("serving_pooling", "serving_embedding", "serving_classification", "serving_scores")


def bound_pooling(state: Any, max_model_len: int, refused: Raise) -> None:
    """Make vLLM's pooling handlers refuse inputs out of bounds with an error from ``refused``.

    ``get_request_factory_online`` lists the inputs of a request before their tokenisation;
    ``_prepare_generators`` gets all token ids before the first engine request.
    """
    for name in _HANDLERS:
        handler = getattr(state, name, None)
        if handler is None:
            continue
        handler._init_ctx = put_token_ids_back(handler._init_ctx)
        handler._prepare_generators = _counted(
            handler, max(MAX_PROMPT_TOKENS, max_model_len), refused
        )
        if hasattr(handler, "json_response_cls"):
            handler.json_response_cls = ORJSONResponse
        for processor in getattr(handler, "io_processors", {"": None}).values():
            bounded = processor or handler.io_processor
            bounded.get_request_factory_online = _bounded(
                bounded.get_request_factory_online, max_model_len, refused
            )


def why_too_long(inputs: Sequence[Mapping[str, Any]], max_model_len: int) -> str:
    """Return why the texts of vLLM's inputs for a context are refused, or ""."""
    settings = (prompt.get("tok_params") for prompt in inputs)
    num_padded = sum(getattr(found, "pad_prompt_tokens", None) is not None for found in settings)
    if num_padded * max_model_len > max(MAX_PROMPT_TOKENS, max_model_len):
        return (
            f"{num_padded:,} inputs padded to {max_model_len:,} tokens have more than "
            f"{MAX_PROMPT_TOKENS:,} tokens in all. Send fewer inputs at once, or do not pad."
        )
    max_chars = max_prompt_chars(max_model_len)
    total = 0
    for one in inputs:
        for text in _texts(one):
            if len(text) > max_chars:
                return (
                    f"A text has {len(text):,} characters, more than the {max_chars:,} that are "
                    "tokenised for the model's context. Please shorten the text."
                )
            total += len(text)
    if total <= _MAX_CHARS:
        return ""
    return (
        f"The texts of this request have {total:,} characters, a query counted once per document, "
        f"more than {_MAX_CHARS:,}. Send fewer documents at once."
    )


def _texts(one: Mapping[str, Any]) -> list[str]:
    """Return the texts of an input: a prompt, or the two sides of a pair."""
    prompt = one.get("prompts")
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    sides = [text, one.get("data_1"), one.get("data_2")]
    return [side for side in sides if isinstance(side, str)]


def _bounded(
    factory: Callable[[Any], Sequence[Any]], max_model_len: int, refused: Raise
) -> Callable[[Any], Sequence[Any]]:
    def bounded(context: Any) -> Sequence[Any]:
        inputs = factory(context)
        if reason := why_too_long(inputs, max_model_len):
            raise refused(reason)
        return inputs

    return bounded


def _counted(handler: Any, max_tokens: int, refused: Raise) -> Callable[[Any], Awaitable[None]]:
    prepare = handler._prepare_generators

    async def counted(context: Any) -> None:
        prompts = [one["prompts"] for one in context.engine_inputs or ()]
        num_tokens = sum(len(prompt.get("prompt_token_ids") or ()) for prompt in prompts)
        if num_tokens > max_tokens:
            raise refused(
                f"The inputs of this request have {num_tokens:,} tokens in all, more than "
                f"{max_tokens:,}. Send fewer inputs at once."
            )
        _charge_numbers(handler, context, len(prompts), num_tokens, refused)
        await prepare(context)

    return counted


def _charge_numbers(
    handler: Any, context: Any, num_inputs: int, num_tokens: int, refused: Raise
) -> None:
    """Count the numbers of all results, and charge their memory."""
    params = context.pooling_params
    num_rows = num_tokens if params.task in _BY_TOKEN else num_inputs
    width = params.dimensions or handler.model_config.get_hidden_size()
    num_numbers = num_rows * (1 if params.task in _OF_CLASSES else width)
    if num_numbers > MAX_NUMBERS:
        raise refused(
            f"The results of this request have {num_numbers:,} numbers, more than "
            f"{MAX_NUMBERS:,}. Send fewer inputs at once, or ask for fewer `dimensions`."
        )
    is_listed = getattr(context.request, "encoding_format", "float") == "float"
    is_by_item = hasattr(handler, "_openai_json_response")
    charge(num_numbers * (_LISTED_BYTES if is_listed and not is_by_item else _BYTES), refused)


class ORJSONResponse(PiecewiseJson):
    """The response class of vLLM's handlers, which give one of this name the arrays themselves."""
