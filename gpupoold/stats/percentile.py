"""Nearest-rank percentiles, for the daemon and the simulator. Pure, standard library only."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from fractions import Fraction


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """Return a nearest-rank percentile (``fraction`` 0.99 for p99), None without values."""
    ordered = sorted(values)
    return ordered[nearest_rank(fraction, len(ordered)) - 1] if ordered else None


def nearest_rank(fraction: float, num_values: int) -> int:
    """Return the rank of a percentile among ``num_values`` ordered values; the lowest rank is 1."""
    numerator, denominator = _exact(fraction)
    return max(1, -(-num_values * numerator // denominator))


@functools.cache
def _exact(fraction: float) -> tuple[int, int]:
    """Return numerator and denominator of the number's decimal notation.

    Floating point is not exact enough: 0.07 * 100 is above 7.
    """
    return Fraction(str(fraction)).as_integer_ratio()
