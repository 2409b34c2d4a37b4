"""Percentiles, computed alike by the daemon and the simulator. Pure, standard library only."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction


def percentile(values: Iterable[float], fraction: float) -> float | None:
    """Nearest-rank percentile (``fraction`` of 0.99 for p99); None without values.

    The rank is exact: ``fraction`` means the decimal number it is written as.
    """
    ordered = sorted(values)
    if not ordered:
        return None
    # In floats 0.07 * 100 is above 7, and its rank would be 8.
    rank = math.ceil(Fraction(str(fraction)) * len(ordered))
    return ordered[max(0, rank - 1)]
