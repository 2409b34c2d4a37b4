"""Texts of figures; the name of a figure ends in the unit."""

from __future__ import annotations

import math

from gpupoold.units import format_bytes, format_duration


def value_text(name: str, value: float) -> str:
    """A value in the unit that the figure's name ends in; infinite for a limit that is none."""
    if math.isinf(value):
        return "none"
    if name.endswith("bytes_per_s"):
        return f"{format_bytes(value)}/s"
    if name.endswith(("tokens_per_s", "_rps")):
        return f"{value:.4g}/s"
    if name.endswith("_s"):
        return f"{'-' if value < 0 else ''}{format_duration(abs(value))}"
    if name.endswith("_bytes"):
        return f"{'-' if value < 0 else ''}{format_bytes(abs(value))}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)
