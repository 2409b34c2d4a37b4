"""Nearest-rank percentiles."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest

from gpupoold.stats.histogram import percentile


def test_percentile_is_the_nearest_rank() -> None:
    values = list(range(1, 101))
    assert percentile(reversed(values), 0.5) == 50
    assert percentile(values, 0.99) == 99
    assert percentile(values, 1.0) == 100
    assert percentile(values, 0.0) == 1
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([1.0, 2.0], 0.5) == 1.0
    assert percentile([], 0.5) is None


@pytest.mark.parametrize("fraction", ["0.001", "0.07", "0.5", "0.9", "0.95", "0.99", "0.999"])
def test_percentile_ranks_are_exact(fraction: str) -> None:
    for count in range(1, 400):
        rank = math.ceil(Fraction(fraction) * count)
        assert percentile(range(1, count + 1), float(fraction)) == rank
