"""Bounds on work that a request causes for each token of its answers, in a frontend or a worker.

The work is done on the event loop or in a step, where other requests wait. Each of the ``n``
answers to each prompt of an HTTP request causes the work again, in the same steps.
docs/security.md lists all such work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


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
        if not value:
            continue
        size = bound.size(value) * num_answers
        if size > bound.most:
            times = f", for each of {num_answers:,} answers" if num_answers > 1 else ""
            return name, (
                f"`{name}` has {bound.size(value):,} {bound.what}{times}; the bound is "
                f"{bound.most:,}, because the work is done for each token."
            )
    return None
