"""Bounds on the work of vLLM's API for one HTTP request and on its grammars, checked before.

An *entry* is the log-probability of one token at one position. vLLM makes the entries of an answer
one by one in Python: 1,300,000 of them take 2.8 s of the event loop and 700 MB.

The errors are vLLM's, which its handlers answer with 400.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams
from vllm.v1.structured_output import backend_xgrammar
from vllm.v1.structured_output.utils import choice_as_grammar

from gpupoold.frontend.callers import current_key_id
from gpupoold.frontend.errors import ApiError, bad_request, for_clients, over_rate
from gpupoold.frontend.gates import refuse
from gpupoold.frontend.grammars import (
    GrammarVerdict,
    GrammarVetting,
    OverBound,
    TooManyGrammars,
    check_constraint,
)
from gpupoold.frontend.large_answers import PiecewiseJson
from gpupoold.frontend.request_context import (
    MAX_ENTRIES_AT_ONCE,
    body_holding,
    counts,
    why_too_much_work,
)
from gpupoold.grammar_backends import grammar_digest
from gpupoold.wire.messages import LoadedModel, ModelToLoad

MAX_PROMPT_TOKENS = 1 << 20
"""Limit of one HTTP request: over all its prompts, times the number of answers.

A model with a longer context takes one prompt of that length.
"""
MAX_CHARS_PER_TOKEN = 8
_ALWAYS_TOKENISED_CHARS = 65_536
_MAX_WORD_CHARS = 16_384
"""Limit of all ``stop`` strings, and of all ``bad_words``, together."""

BYTES_PER_ENTRY = 600
"""The memory of an entry from the engine's output to the end of the answer, most of which the
objects of a chat completion take.
"""
_LOGPROB_FIELDS = "`logprobs`, `top_logprobs`, `prompt_logprobs` and `logprob_token_ids`"

MAX_NUMBERS = 2_048 * 4_096
"""Limit of the numbers in all results of one pooling request: OpenAI's inputs in 4,096
dimensions.
"""
_BY_TOKEN = frozenset({"token_embed", "token_classify"})
_OF_CLASSES = frozenset({"classify", "token_classify"})
_BYTES = 8
"""The memory of a number, with the engine's message; texts of numbers are made while sent."""
_LISTED_BYTES = 64
"""The same where vLLM lists all numbers before any is sent."""
# vLLM's pooling handlers in the state of its application.
_POOLING = ("serving_pooling", "serving_embedding", "serving_classification", "serving_scores")

_FIELD = "structured_outputs"
_RETRY_S = 2.0
_mount_ids = itertools.count(1)


def refused(error: ApiError, parameter: str | None = None) -> VLLMValidationError:
    """Return an error to end vLLM's work, in place of which the client gets ``error``."""
    refuse(error)
    return VLLMValidationError(error.message, parameter=parameter or error.param)


def charge(num_bytes: int, parameter: str | None = None) -> None:
    """Add bytes to the bytes in flight of the request being served.

    Raises VLLMValidationError: too many bytes are in flight; the client gets 413 or 429.
    """
    if (holding := body_holding.get()) is not None:
        try:
            holding.add(num_bytes)
        except ApiError as error:
            raise refused(error, parameter) from error


def check_work(params: SamplingParams) -> None:
    """Check the work for each token of all answers of the HTTP request."""
    count = counts.get()
    if costly := why_too_much_work(params, 1 if count is None else count.num_prompts):
        raise VLLMValidationError(costly[1], parameter=costly[0])


def check_words(params: Any) -> None:
    for name in ("stop", "bad_words"):
        num_chars = sum(map(len, getattr(params, name, None) or ()))
        if num_chars > _MAX_WORD_CHARS:
            raise VLLMValidationError(
                f"`{name}` has {num_chars:,} characters in all, more than {_MAX_WORD_CHARS:,}.",
                parameter=name,
            )


def bound_renderer(renderer: Any, max_model_len: int) -> None:
    """Make vLLM's renderer refuse prompts out of bounds.

    vLLM has no bound on texts for truncation or tokenisation only, and one of up to some 100
    characters per token on others; its tokeniser would take minutes and gigabytes.
    """
    max_chars, max_tokens = _max_chars(max_model_len), max(MAX_PROMPT_TOKENS, max_model_len)
    tokenize, tokenize_async = renderer._tokenize_prompt, renderer._tokenize_prompt_async
    process = renderer.process_for_engine_async

    @contextlib.contextmanager
    def tokenising(prompt: Any) -> Iterator[None]:
        """Refuse a text at which the tokenizer fails, as at one with too many ways to match.

        The tokenizers' library raises ``Exception`` itself, and panics that are no ``Exception``.
        """
        num_chars = len(prompt["prompt"])
        if num_chars > max_chars:
            raise VLLMValidationError(
                f"The prompt has {num_chars:,} characters, more than the {max_chars:,} that are "
                f"tokenised for a context of {max_model_len:,} tokens. "
                "Please reduce the length of the input prompt, or send it as token ids."
            )
        try:
            yield
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            reason = str(error)[:200]
            raise VLLMValidationError(
                f"The tokenizer of this model fails at this text: {reason}"
            ) from error

    def tokenize_bounded(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        with tokenising(prompt):
            return tokenize(prompt, *args, **kwargs)

    async def tokenize_bounded_async(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        with tokenising(prompt):
            return await tokenize_async(prompt, *args, **kwargs)

    async def process_counted(prompt: Any, *args: Any, **kwargs: Any) -> Any:
        if (count := counts.get()) is not None:
            count.num_prompt_tokens += len(prompt.get("prompt_token_ids") or ()) * count.num_samples
            if count.num_prompt_tokens > max_tokens:
                raise VLLMValidationError(
                    f"The prompts of this request have more than {max_tokens:,} tokens in all, "
                    "each counted `n` times. Send fewer prompts or samples at once."
                )
        return await process(prompt, *args, **kwargs)

    renderer._tokenize_prompt = tokenize_bounded  # for pooling requests
    renderer._tokenize_prompt_async = tokenize_bounded_async
    renderer.process_for_engine_async = process_counted


def _max_chars(max_model_len: int) -> int:
    """Return the most characters of a text that are tokenised for a context."""
    return max(_ALWAYS_TOKENISED_CHARS, MAX_CHARS_PER_TOKEN * max_model_len)


class WantedEntries(NamedTuple):
    """The entries that an engine request asks for: of its prompt, and per token of its answers."""

    of_prompt: int
    per_token: int


def wanted_entries(params: Any, num_prompt_tokens: int, vocab_size: int) -> WantedEntries:
    """Return the entries of vLLM's ``SamplingParams``; -1 stands for the whole vocabulary."""

    def at_a_position(number: int | None) -> int:
        if number is None:
            return 0
        return 1 + (vocab_size if number < 0 else number)

    ids = params.logprob_token_ids
    at_each = max(at_a_position(params.logprobs), at_a_position(len(ids) if ids else None))
    in_prompt = at_a_position(params.prompt_logprobs)
    return WantedEntries(params.n * num_prompt_tokens * in_prompt, params.n * at_each)


def count_entries(wanted: WantedEntries, max_tokens: int, *, is_stream: bool) -> int:
    """Count and charge the entries of an engine request; return its limit of tokens.

    The limit is ``max_tokens``, or lower if the client has set none and not all would fit. Raises
    VLLMValidationError: the HTTP request asks for too many.
    """
    count = counts.get()
    if count is None or not any(wanted):
        return max_tokens

    def too_many(asked: int, bound: int) -> VLLMValidationError:
        return VLLMValidationError(
            f"The request asks for {count.num_entries + asked:,} log-probabilities or more, more "
            f"than {bound:,}: {_LOGPROB_FIELDS} count at each token of a prompt or of an answer, "
            "one more for the token itself, and all of them `n` times. Ask for fewer, lower "
            "`max_tokens`, or send fewer prompts at once."
        )

    free, fitting = count.max_entries - count.num_entries, max_tokens
    if wanted.per_token:
        fitting = min(max_tokens, (free - wanted.of_prompt) // wanted.per_token)
    if (is_stream and wanted.of_prompt > MAX_ENTRIES_AT_ONCE) or wanted.of_prompt > free:
        raise too_many(wanted.of_prompt, MAX_ENTRIES_AT_ONCE if is_stream else count.max_entries)
    if fitting < max_tokens and (count.has_limit or fitting < 1):
        raise too_many(wanted.of_prompt + wanted.per_token * max_tokens, count.max_entries)
    num_entries = wanted.of_prompt + wanted.per_token * fitting
    charge(num_entries * BYTES_PER_ENTRY)
    count.num_entries += num_entries
    return fitting


def limit_logprobs(prompt: Any, params: SamplingParams, model_config: Any) -> None:
    """Count the log-probabilities of a request; lower its limit of tokens if the client set none.

    Raises VLLMValidationError: the HTTP request asks for too many.
    """
    if params.detokenize:  # or else a part of a beam search, which has been counted
        part = prompt.get("decoder_prompt", prompt) if isinstance(prompt, dict) else {}
        num_tokens = len(part.get("prompt_token_ids") or ())
        params.max_tokens = count_entries(
            wanted_entries(params, num_tokens, model_config.get_vocab_size()),
            params.max_tokens or model_config.max_model_len,
            is_stream=params.output_kind is RequestOutputKind.DELTA,
        )


def limit_beams(state: Any) -> None:
    """Make the handlers in the state of vLLM's application count beam searches."""
    for name in ("openai_serving_completion", "openai_serving_chat"):
        if (serving := getattr(state, name, None)) is not None:
            serving.beam_search = _limited(serving.beam_search)


def _limited(search: Callable[..., Any]) -> Callable[..., Any]:
    def limited(prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any) -> Any:
        # A beam search gets twice its width for each token of a beam.
        wanted = WantedEntries(0, params.beam_width * (2 * params.beam_width + 1))
        params.max_tokens = count_entries(wanted, params.max_tokens, is_stream=False)
        return search(prompt, request_id, params, *args, **kwargs)

    return limited


def bound_pooling(state: Any, max_model_len: int) -> None:
    """Make vLLM's pooling handlers refuse inputs out of bounds.

    vLLM tokenises the inputs of a pooling request itself, each in a thread; a query is tokenised
    again with every document. ``get_request_factory_online`` lists the inputs of a request before
    their tokenisation; ``_prepare_generators`` gets all token ids before the first engine request.
    """
    for handler in filter(None, (getattr(state, name, None) for name in _POOLING)):
        handler._init_ctx = _with_token_ids(handler._init_ctx)
        handler._prepare_generators = _counted(handler, max(MAX_PROMPT_TOKENS, max_model_len))
        if hasattr(handler, "json_response_cls"):
            handler.json_response_cls = ORJSONResponse
        for processor in getattr(handler, "io_processors", {"": None}).values():
            bounded = processor or handler.io_processor
            bounded.get_request_factory_online = _bounded(
                bounded.get_request_factory_online, max_model_len
            )


def input_slot() -> contextlib.AbstractAsyncContextManager[Any]:
    """Return a context that waits until one more input of the HTTP request may begin."""
    count = counts.get()
    return contextlib.nullcontext() if count is None else count.slots


def _with_token_ids(begin: Callable[..., Any]) -> Callable[..., Any]:
    """Return the first function of vLLM's pooling handlers, which gets the validated request.

    The token ids that were left out of the body are put back: see ``without_token_ids``.
    """

    async def begun(processor: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
        count = counts.get()
        if count is not None and count.token_ids is not None:
            request.input = count.token_ids
        return await begin(processor, request, *args, **kwargs)

    return begun


def _bounded(factory: Callable[[Any], Any], max_model_len: int) -> Callable[[Any], Any]:
    def bounded(context: Any) -> Any:
        inputs = factory(context)
        if reason := why_too_long(inputs, max_model_len):
            raise VLLMValidationError(reason)
        return inputs

    return bounded


def why_too_long(inputs: Sequence[Mapping[str, Any]], max_model_len: int) -> str:
    """Return why the texts of vLLM's inputs for a context are refused, or ""."""
    settings = (prompt.get("tok_params") for prompt in inputs)
    num_padded = sum(getattr(found, "pad_prompt_tokens", None) is not None for found in settings)
    if num_padded * max_model_len > max(MAX_PROMPT_TOKENS, max_model_len):
        return (
            f"{num_padded:,} inputs padded to {max_model_len:,} tokens have more than "
            f"{MAX_PROMPT_TOKENS:,} tokens in all. Send fewer inputs at once, or do not pad."
        )
    lengths = [len(text) for item in inputs for text in _texts(item)]
    max_chars, max_in_all = _max_chars(max_model_len), MAX_CHARS_PER_TOKEN * MAX_PROMPT_TOKENS
    if (longest := max(lengths, default=0)) > max_chars:
        return (
            f"A text has {longest:,} characters, more than the {max_chars:,} that are tokenised "
            "for the model's context. Please shorten the text."
        )
    if (total := sum(lengths)) <= max_in_all:
        return ""
    return (
        f"The texts of this request have {total:,} characters, a query counted once per document, "
        f"more than {max_in_all:,}. Send fewer documents at once."
    )


def _texts(one: Mapping[str, Any]) -> list[str]:
    """Return the texts of an input: a prompt, or the two sides of a pair."""
    prompt = one.get("prompts")
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else None
    sides = [text, one.get("data_1"), one.get("data_2")]
    return [side for side in sides if isinstance(side, str)]


def _counted(handler: Any, max_tokens: int) -> Callable[[Any], Any]:
    """Return the handler's preparation, after checks of all tokens and all numbers of results."""
    prepare = handler._prepare_generators

    async def counted(context: Any) -> None:
        prompts = [inputs["prompts"] for inputs in context.engine_inputs or ()]
        num_tokens = sum(len(prompt.get("prompt_token_ids") or ()) for prompt in prompts)
        if num_tokens > max_tokens:
            raise VLLMValidationError(
                f"The inputs of this request have {num_tokens:,} tokens in all, more than "
                f"{max_tokens:,}. Send fewer inputs at once."
            )
        params = context.pooling_params
        num_rows = num_tokens if params.task in _BY_TOKEN else len(prompts)
        width = params.dimensions or handler.model_config.get_hidden_size()
        num_numbers = num_rows * (1 if params.task in _OF_CLASSES else width)
        if num_numbers > MAX_NUMBERS:
            raise VLLMValidationError(
                f"The results of this request have {num_numbers:,} numbers, more than "
                f"{MAX_NUMBERS:,}. Send fewer inputs at once, or ask for fewer `dimensions`."
            )
        is_listed = getattr(context.request, "encoding_format", "float") == "float"
        is_by_item = hasattr(handler, "_openai_json_response")
        charge(num_numbers * (_LISTED_BYTES if is_listed and not is_by_item else _BYTES))
        await prepare(context)

    return counted


class ORJSONResponse(PiecewiseJson):
    """The response class of vLLM's handlers, which give one of this name the arrays themselves."""


class ModelGrammars:
    """Checks the grammars of one mounted model's requests.

    vLLM 0.32.0 validates a grammar on the event loop, in ``InputProcessor.process_inputs`` and
    while parsing a body. Both are replaced: the grammar checker validates in another process.
    """

    def __init__(self, vetting: GrammarVetting, model: ModelToLoad, loaded: LoadedModel) -> None:
        self._vetting = vetting
        self._model = model
        self._loaded = loaded
        self._mount_id = next(_mount_ids)

    async def vetted(self, params: Any) -> Any:
        """Return the parameters with their grammar in the form of vLLM's validation.

        Raises VLLMValidationError: the grammar may not be used, or cannot be checked now; the
        answer is refused with the reason.
        """
        if not isinstance(params, SamplingParams) or params.structured_outputs is None:
            return params
        structured = params.structured_outputs
        parts = {
            field.name: value
            for field in dataclasses.fields(structured)
            if field.init and (value := getattr(structured, field.name)) not in (None, False)
        }
        try:
            constraint = check_constraint(parts)
            verdict = await self._vetting.verdict(
                self._mount_id, self._model, self._loaded, constraint, current_key_id()
            )
        except OverBound as error:
            raise refused(bad_request(f"{error}.", param=error.field)) from error
        except TooManyGrammars as error:
            text = "Too many new grammars (schemas, patterns, choices, tools) wait to be checked."
            raise refused(over_rate(text, _RETRY_S)) from error
        if verdict.outcome == "unknown":
            reason = for_clients(verdict.reason) or "the checker has ended"
            text = f"The grammar cannot be checked now: {reason}."
            raise refused(ApiError(503, text, retry_after_s=_RETRY_S))
        if verdict.outcome == "refused":
            reason = for_clients(verdict.reason)
            raise refused(bad_request(f"The grammar cannot be used: {reason}", param=_FIELD))
        params = copy.copy(params)
        params.structured_outputs = _validated(structured, verdict)
        if self._vetting.has_convictions:
            digest = grammar_digest(params.structured_outputs)
            if reason := self._vetting.conviction(self._model.name, current_key_id(), digest):
                raise refused(bad_request(reason, param=_FIELD))
        return params


def _validated(
    structured: StructuredOutputsParams, verdict: GrammarVerdict
) -> StructuredOutputsParams:
    if verdict.backend == "xgrammar" and structured.choice:
        grammar = choice_as_grammar(structured.choice)
        validated = dataclasses.replace(structured, choice=None, grammar=grammar)
    else:
        validated = dataclasses.replace(structured)
    validated._backend = verdict.backend
    validated._backend_was_auto = True
    return validated


def keep_grammars_off_the_loop() -> None:
    """Replace xgrammar's native validation in this process.

    While parsing a body, vLLM validates structural tags, and asks whether xgrammar supports the
    schemas of tools. The request's check covers both.
    """
    backend_xgrammar.validate_xgrammar_grammar = _check_features  # type: ignore[assignment]


def _check_features(params: SamplingParams) -> None:
    structured = params.structured_outputs
    if structured is None or not structured.json:
        return
    schema = structured.json
    if isinstance(schema, str):
        schema = json.loads(schema)
    if isinstance(schema, Mapping) and backend_xgrammar.has_xgrammar_unsupported_json_features(
        dict(schema)
    ):
        raise VLLMValidationError("xgrammar does not support the JSON schema")
