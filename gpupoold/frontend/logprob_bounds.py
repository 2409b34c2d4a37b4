"""Bounds on the log-probabilities of one HTTP request, checked before its first engine request.

An *entry* is the log-probability of one token at one position. vLLM makes the entries of an answer
one by one in Python: 1,300,000 of them take 2.8 s of the event loop and 700 MB.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.output_processor import RequestState

from gpupoold.frontend.in_flight import charge
from gpupoold.frontend.prompt_bounds import Raise

MAX_ENTRIES = 100_000
"""Limit of one HTTP request: 4,700 tokens of an answer with 20 alternatives each."""
MAX_ENTRIES_AT_ONCE = 25_000
"""The same where vLLM makes all entries in one piece on the event loop: the echoed prompt in a
stream, and everything in the responses API.
"""
BYTES_PER_ENTRY = 600
"""The memory of an entry from the engine's output to the end of the answer, most of which the
objects of a chat completion take.
"""
_FIELDS = "`logprobs`, `top_logprobs`, `prompt_logprobs` and `logprob_token_ids`"

_ROWS = 16
"""Positions of a prompt between two looks at the clock."""
_SLICE_S = 0.005


@dataclass(slots=True)
class LogprobCount:
    """The entries of one HTTP request so far.

    ``has_limit``: the client limits the tokens of an answer itself.
    """

    has_limit: bool
    max_entries: int = MAX_ENTRIES
    num_entries: int = 0


@dataclass(frozen=True)
class WantedEntries:
    """The entries that an engine request asks for: of its prompt, and per token of its answers."""

    of_prompt: int
    per_token: int

    def max_tokens(self, max_tokens: int, free: int) -> int:
        """Return how many tokens of an answer fit into ``free`` entries, at most ``max_tokens``."""
        if not self.per_token:
            return max_tokens
        return min(max_tokens, (free - self.of_prompt) // self.per_token)


_current: ContextVar[LogprobCount | None] = ContextVar("logprob_count", default=None)


@contextlib.contextmanager
def counting_logprobs(has_limit: bool, path: str) -> Iterator[None]:
    """Count the entries asked for in the context, and in its tasks, as those of one request."""
    is_at_once = path.startswith("/v1/responses")
    most = MAX_ENTRIES_AT_ONCE if is_at_once else MAX_ENTRIES
    token = _current.set(LogprobCount(has_limit, most))
    try:
        yield
    finally:
        _current.reset(token)


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


def wanted_by_beams(width: int) -> WantedEntries:
    """Return the entries of a beam search, which gets twice its width for each token of a beam."""
    return WantedEntries(0, width * (2 * width + 1))


def count_entries(
    wanted: WantedEntries, max_tokens: int, refused: Raise, *, is_stream: bool
) -> int:
    """Count and charge the entries of an engine request; return its limit of tokens.

    The limit is ``max_tokens``, or lower if the client has set none and not all would fit.

    Raises:
        Exception: an error from ``refused``; the request asks for too many entries.
    """
    count = _current.get()
    if count is None or not (wanted.of_prompt or wanted.per_token):
        return max_tokens
    free = count.max_entries - count.num_entries
    fitting = wanted.max_tokens(max_tokens, free)
    if (is_stream and wanted.of_prompt > MAX_ENTRIES_AT_ONCE) or wanted.of_prompt > free:
        bound = MAX_ENTRIES_AT_ONCE if is_stream else count.max_entries
        raise refused(_too_many(wanted.of_prompt, count, bound))
    if fitting < max_tokens and (count.has_limit or fitting < 1):
        asked = wanted.of_prompt + wanted.per_token * max_tokens
        raise refused(_too_many(asked, count, count.max_entries))
    num_entries = wanted.of_prompt + wanted.per_token * fitting
    charge(num_entries * BYTES_PER_ENTRY, refused)
    count.num_entries += num_entries
    return fitting


def _too_many(asked: int, count: LogprobCount, bound: int) -> str:
    return (
        f"The request asks for {count.num_entries + asked:,} log-probabilities or more, more than "
        f"{bound:,}: {_FIELDS} count at each token of a prompt or of an answer, one more for the "
        "token itself, and all of them `n` times. Ask for fewer, lower `max_tokens`, or send fewer "
        "prompts at once."
    )


def limit_logprobs(prompt: Any, params: SamplingParams, model_config: Any) -> None:
    """Count the log-probabilities of a request; lower its limit of tokens if the client set none.

    Raises:
        VLLMValidationError: the HTTP request asks for too many.
    """
    if params.detokenize:  # or else a part of a beam search, which has been counted
        params.max_tokens = count_entries(
            wanted_entries(params, _num_tokens(prompt), model_config.get_vocab_size()),
            params.max_tokens or model_config.max_model_len,
            VLLMValidationError,
            is_stream=params.output_kind is RequestOutputKind.DELTA,
        )


def limit_beams(state: Any) -> None:
    """Make the handlers in the state of vLLM's application count beam searches."""
    for name in ("openai_serving_completion", "openai_serving_chat"):
        if (serving := getattr(state, name, None)) is not None:
            serving.beam_search = _limited(serving.beam_search)


def has_logprobs(params: object) -> bool:
    """Return whether a request asks for log-probabilities; pooling requests never do."""
    if not isinstance(params, SamplingParams):
        return False
    return params.num_logprobs is not None or params.prompt_logprobs is not None


def _limited(search: Callable[..., Any]) -> Callable[..., Any]:
    def limited(prompt: Any, request_id: str, params: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = wanted_by_beams(params.beam_width)
        params.max_tokens = count_entries(
            wanted, params.max_tokens, VLLMValidationError, is_stream=False
        )
        return search(prompt, request_id, params, *args, **kwargs)

    return limited


def _num_tokens(prompt: Any) -> int:
    part = prompt.get("decoder_prompt", prompt) if isinstance(prompt, dict) else {}
    return len(part.get("prompt_token_ids") or ())


class PromptLogprobs:
    """Outputs that are held back until their log-probabilities are made.

    ``states`` are the requests of vLLM's output processor, by engine request.

    vLLM makes the log-probabilities of a step in one piece on the event loop: four prompts of
    1,000 tokens with 20 alternatives each take 0.2 s, and more where tokens end within a
    character.
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
