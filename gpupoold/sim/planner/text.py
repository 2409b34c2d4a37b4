"""Lists of model names in changes and notes of a plan."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_NAMED = 3


def names_text(names: Sequence[str], num_models: int) -> str:
    """Return ``a, b``; the number and the first two names if more than three; or "all models"."""
    if len(names) == num_models > 1:
        return "all models"
    if len(names) > _MAX_NAMED:
        return f"{len(names)} models ({', '.join(names[:2])}, ...)"
    return ", ".join(names)
