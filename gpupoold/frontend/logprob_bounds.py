"""Bounds on the log-probabilities of one HTTP request, checked before its first engine request.

An *entry* is the log-probability of one token at one position. vLLM makes the entries of an answer
one by one in Python: 1,300,000 of them take 2.8 s of the event loop and 700 MB.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

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
