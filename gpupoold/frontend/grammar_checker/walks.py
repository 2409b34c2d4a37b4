"""Walks through a grammar, as answers would take it, that show what a token costs.

The cost of a token depends on the tokens before. So several walks take a text of the length of an
answer: forced text at once, and then tokens that make the most of the grammar, the longest.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import numpy
import torch
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

MAX_STEP_S = 0.05
"""Limit of CPU time for a mask or a token, in seconds; a worker has the same limit."""
MAX_CHARS = 2_000
"""Bytes of text of a walk."""
MAX_WALKS_S = 0.5
"""CPU time of all walks, in seconds."""
_NUM_TOKENS = 24

Lengths = numpy.ndarray[Any, numpy.dtype[numpy.int32]]
Choice = Callable[[Lengths, Lengths], int]
"""Chooses one of the permitted tokens, which have the given lengths."""


def walk(make: Callable[[], StructuredOutputGrammar], lengths: Lengths) -> None:
    """Take tokens of several texts; ``lengths`` has the bytes of each token by id.

    Raises:
        ValueError: no token is permitted, or a step takes too long for streams of the same batch.
    """
    draw = random.Random(0)
    deadline_s = time.thread_time() + MAX_WALKS_S

    def any_token(allowed: Lengths, _: Lengths) -> int:
        return int(draw.choice(allowed))

    def longest(allowed: Lengths, sizes: Lengths) -> int:
        return int(allowed[int(sizes.argmax())])

    def one_of_the_long(allowed: Lengths, sizes: Lengths) -> int:
        return int(draw.choice(allowed[sizes * 2 >= sizes.max()]))

    _Walk(make(), lengths, deadline_s).take(any_token, _NUM_TOKENS, MAX_CHARS)
    for choice in (longest, one_of_the_long, any_token):
        walking = _Walk(make(), lengths, deadline_s)
        walking.take_forced(MAX_CHARS)
        walking.take(choice, MAX_CHARS, MAX_CHARS)


class _Walk:
    def __init__(
        self, grammar: StructuredOutputGrammar, lengths: Lengths, deadline_s: float
    ) -> None:
        self._grammar = grammar
        self._lengths = lengths
        self._deadline_s = deadline_s
        num_words = -(-len(lengths) // 32)
        self._bitmask = torch.full((1, num_words), -1, dtype=torch.int32)

    def take_forced(self, max_chars: int) -> None:
        """Take the text that the grammar begins with in any case."""
        matcher = getattr(self._grammar, "matcher", None)
        if matcher is not None:  # xgrammar
            text = matcher.find_jump_forward_string().encode("utf-8", "surrogatepass")
            matcher.accept_string(text[:max_chars])

    def take(self, choose: Choice, max_tokens: int, max_chars: int) -> None:
        """Take permitted tokens until the end of the text, or a limit."""
        num_chars = 0
        for index in range(max_tokens):
            is_late = time.thread_time() > self._deadline_s
            if self._grammar.is_terminated() or num_chars > max_chars or is_late:
                return
            self._timed(self._grammar.fill_bitmask, self._bitmask, 0)
            bits = numpy.unpackbits(self._bitmask.numpy().view(numpy.uint8), bitorder="little")
            allowed = bits[: len(self._lengths)].nonzero()[0].astype(numpy.int32)
            if not len(allowed):
                if not index:
                    raise ValueError("no answer matches the grammar")
                return
            token = choose(allowed, self._lengths[allowed])
            num_chars += int(self._lengths[token])
            if not self._timed(self._grammar.accept_tokens, "", [token]):
                return

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        started_s = time.thread_time()
        result = call(*arguments)
        taken_s = time.thread_time() - started_s
        if taken_s > MAX_STEP_S:
            raise ValueError(
                f"a token takes {taken_s * 1000:.0f} ms; the bound is {MAX_STEP_S * 1000:.0f}"
            )
        return result
