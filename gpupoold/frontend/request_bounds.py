"""Counts of one HTTP request, and bounds on work that a request causes for each token.

The work of each token is done in a frontend's event loop or in a worker's step, where other
requests wait. Each of the ``n`` answers to each prompt of an HTTP request causes the work again, in
the same steps. :mod:`.vllm_bounds` has the bounds that need vLLM, without which the
frontend begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from gpupoold.frontend.pooling_bodies import TokenIds

MAX_ENTRIES = 100_000
"""Limit of the log-probabilities of one HTTP request: 4,700 tokens of an answer with 20
alternatives each.
"""
MAX_ENTRIES_AT_ONCE = 25_000
"""The same where vLLM makes all entries in one piece on the event loop: the echoed prompt in a
stream, and everything in the responses API.
"""
INPUTS_AT_ONCE = 128
"""Inputs of a pooling request that wait or run at once, as requests of their own: to begin with
2,048 takes the event loop, and the daemon, most of a second without a pause.
"""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class RequestTally:
    """The counts of one HTTP request so far, and its limits.

    Each of the ``num_prompts`` counts ``num_samples`` times. ``has_limit``: the client limits the
    tokens of an answer itself. ``max_entries`` bounds the log-probabilities, ``slots`` the inputs
    of a pooling request in the engine, whose ``token_ids`` were left out of the body.
    """

    num_prompts: int
    num_samples: int
    slots: asyncio.Semaphore
    has_limit: bool = False
    max_entries: int = MAX_ENTRIES
    token_ids: TokenIds | None = None
    num_prompt_tokens: int = 0
    num_entries: int = 0


class RequestLocal(Generic[T]):
    """A value for each HTTP request, as ``threading.local`` has for each thread."""

    def __init__(self, name: str) -> None:
        self._variable: ContextVar[T | None] = ContextVar(name, default=None)

    def get(self) -> T | None:
        """Return the value of the request being served, None outside of requests."""
        return self._variable.get()

    @contextlib.contextmanager
    def holding(self, value: T | None) -> Iterator[None]:
        """Set the value for the context, and for tasks that begin inside."""
        token = self._variable.set(value)
        try:
            yield
        finally:
            self._variable.reset(token)


counts: RequestLocal[RequestTally] = RequestLocal("request_counts")


class _Bound(NamedTuple):
    """``size`` returns the size of a field's value for one answer; ``what`` says of what."""

    size: Callable[[Any], int]
    most: int
    what: str


def _num_comparisons(detection: Any) -> int:
    """Return the most tokens that a search for repetitions compares for one token.

    A pattern of each size is compared with its ``min_count`` repetitions.
    """
    size = max(0, int(detection.max_pattern_size))
    return size * size * max(0, int(detection.min_count)) // 2


_BOUNDS: dict[str, _Bound] = {
    # At each change of the batch vLLM makes the biases and the tokens of all requests anew.
    "logit_bias": _Bound(len, 16_384, "tokens"),
    # Each new token is looked up in a list.
    "stop_token_ids": _Bound(len, 16_384, "tokens"),
    # Each string is searched in the new text.
    "stop": _Bound(lambda stop: 1 if isinstance(stop, str) else len(stop), 4_096, "strings"),
    # Each is compared with the last tokens.
    "bad_words": _Bound(len, 1_024, "words"),
    "repetition_detection": _Bound(
        _num_comparisons,
        65_536,
        "comparisons for each token (`max_pattern_size` squared, times `min_count`, halved)",
    ),
}


def why_too_much_work(params: Any, num_prompts: int = 1) -> tuple[str, str] | None:
    """Return the field that is over its bound, and why; None if none is.

    ``params`` are the sampling parameters of each of an HTTP request's ``num_prompts``.
    """
    num_answers = num_prompts * int(getattr(params, "n", 1) or 1)
    for name, bound in _BOUNDS.items():
        value = getattr(params, name, None)
        if value and (size := bound.size(value)) * num_answers > bound.most:
            times = f", for each of {num_answers:,} answers" if num_answers > 1 else ""
            return name, (
                f"`{name}` has {size:,} {bound.what}{times}; the bound is {bound.most:,}, because "
                "the work is done for each token."
            )
    return None
