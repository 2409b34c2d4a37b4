"""The pace of streams as text: ``off``, ``steady``, or a duration between two tokens."""

from __future__ import annotations

import math

from gpupoold.units import parse_duration_s

OFF, STEADY = "off", "steady"
_LEAST_GAP_S = 0.001
_MAX_CHARS = 32


def gap_s_of(text: str) -> float | None:
    """Return the gap between two tokens in seconds, None for ``off``.

    The gap is infinite for ``steady``, which stands for the model's TBT target.

    Raises:
        ValueError: the text is no pace; the message says what is.
    """
    wanted = text.strip().lower()
    if wanted == OFF:
        return None
    if wanted == STEADY:
        return math.inf
    gap_s = _gap_s(wanted) if len(wanted) <= _MAX_CHARS else 0.0
    if gap_s < _LEAST_GAP_S:
        raise ValueError(
            f"{text[:_MAX_CHARS]!r} is no pace: write `{STEADY}`, `{OFF}` or a duration of at "
            "least 1 ms, such as `50ms`"
        )
    return gap_s


def _gap_s(text: str) -> float:
    """Return the gap in seconds, 0 for a text that is no duration."""
    try:
        return parse_duration_s(text)
    except ValueError:
        return 0.0


def checked_pace(text: str) -> str:
    """Return the text of a pace in lower case, without spaces around; empty stays empty.

    Raises:
        ValueError: see :func:`gap_s_of`.
    """
    if text:
        gap_s_of(text)
    return text.strip().lower()
