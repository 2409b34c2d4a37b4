"""Values of options with several entries, separated by commas."""

from __future__ import annotations

from typing import TypeVar

from gpupoold.errors import UsageError

N = TypeVar("N", int, float)


def names(text: str) -> tuple[str, ...]:
    """Return the names without surrounding space."""
    return tuple(part.strip() for part in text.split(","))


def numbers(option: str, text: str, kind: type[N], example: str) -> tuple[N, ...]:
    """Return the numbers in ``text``, the value of ``option``; ``example`` shows the form.

    Raises:
        UsageError: the message names the option.
    """
    try:
        return tuple(kind(part) for part in text.split(","))
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        problem = f"{option}: {text!r} is not a list of {what}"
        raise UsageError(problem, f"write for example {example}") from None
