"""Counts of values by size."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from gpupoold.stats.buckets import LATENCY_BOUNDS_S, WORK_BOUNDS_S, Buckets


@pytest.mark.parametrize("bounds", [LATENCY_BOUNDS_S, WORK_BOUNDS_S])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert all(lower < upper for lower, upper in pairwise(bounds))


@pytest.mark.parametrize(
    ("value", "bucket"), [(-1.0, 0), (0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)]
)
def test_a_bound_belongs_to_its_bucket(value: float, bucket: int) -> None:
    buckets = Buckets((1.0, 2.0))
    buckets.add(value)
    assert buckets.counts.index(1) == bucket == bisect_left((1.0, 2.0), value)


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(1, 5))))
def test_nothing_is_lost(values: list[tuple[float, int]]) -> None:
    buckets = Buckets()
    for value, num in values:
        buckets.add(value, num)
    assert sum(buckets.counts) == sum(num for _, num in values)
    assert buckets.sum == pytest.approx(sum(value * num for value, num in values))
    for limit, below in zip(LATENCY_BOUNDS_S, _cumulative(buckets.counts), strict=False):
        assert below == sum(num for value, num in values if value <= limit)


def _cumulative(counts: list[int]) -> list[int]:
    return [sum(counts[: index + 1]) for index in range(len(counts))]
