"""Durations counted by bucket: percentiles near the exact ones, sums, differences, text."""

from __future__ import annotations

import random
from bisect import bisect_left
from itertools import accumulate, pairwise

import pytest
from hypothesis import given, strategies as st

from gpupoold.stats.histogram import (
    BOUNDS_S,
    LATENCY_BOUNDS_S,
    WORK_BOUNDS_S,
    Histogram,
    percentile,
)


def histogram(*durations_s: float) -> Histogram:
    made = Histogram()
    for duration_s in durations_s:
        made.add(duration_s)
    return made


def test_nothing() -> None:
    assert histogram().percentile(0.5) is None
    assert (len(histogram()), histogram().sum_s) == (0, 0.0)


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.5, 0.9, 0.99, 1.0])
def test_percentiles_are_near_the_exact_ones(fraction: float) -> None:
    rng = random.Random(7)
    durations_s = [rng.lognormvariate(-3.0, 1.5) for _ in range(3000)]
    exact_s, near_s = (
        percentile(durations_s, fraction),
        histogram(*durations_s).percentile(fraction),
    )
    assert exact_s is not None
    assert near_s == pytest.approx(exact_s, rel=0.075), "no further than a bucket is wide"


@pytest.mark.parametrize("num", [0, 1, 2, 3000])
def test_two_percentiles_at_once_are_those_by_themselves(num: int) -> None:
    rng = random.Random(5)
    made = histogram(*(rng.lognormvariate(-3.0, 1.5) for _ in range(num)))
    assert made.p50_and_p99() == (made.percentile(0.5), made.percentile(0.99))


def test_a_single_duration_is_within_half_a_bucket() -> None:
    for duration_s in (0.0002, 0.04, 1.0, 77.0, 9999.0):
        assert histogram(duration_s).percentile(0.5) == pytest.approx(duration_s, rel=0.037)


def test_beyond_the_bounds() -> None:
    assert histogram(0.0, 1e-5).percentile(0.99) == 0.0
    assert histogram(1e9).percentile(0.99) == BOUNDS_S[-1]


def test_merged_and_taken_away_again() -> None:
    one, other = histogram(0.1, 0.1, 3.0), histogram(0.1, 0.02)
    total = histogram()
    total.merge(one)
    total.merge(other)
    assert total == histogram(0.1, 0.1, 3.0, 0.1, 0.02)
    assert total.sum_s == pytest.approx(3.32)
    total.merge(other, -1)
    assert total == one
    total.merge(one, -1)
    assert total == histogram()
    assert total.sum_s == 0.0, "no rounding is left over"


def test_no_more_can_be_taken_away_than_is_there() -> None:
    with pytest.raises(AssertionError):
        histogram(0.1).merge(histogram(0.2), -1)


def test_to_text_and_back() -> None:
    some = histogram(0.01, 0.02, 0.02, 5.0)
    again = Histogram.parse(some.text())
    assert again == some
    assert again.sum_s == some.sum_s
    assert Histogram.parse(histogram().text()) == histogram()


@pytest.mark.parametrize("text", ["", "[]", "{}", "[0, [1]]", "[0, 1]", "nonsense", '["x"]'])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a histogram"):
        Histogram.parse(text)


def test_counts_by_coarser_bounds_are_exact() -> None:
    rng = random.Random(11)
    durations_s = [rng.lognormvariate(-3.0, 2.5) for _ in range(2000)] + [*LATENCY_BOUNDS_S, 1e9]
    plain = Histogram(LATENCY_BOUNDS_S)
    for duration_s in durations_s:
        plain.add(duration_s)
    expected = plain.counts_by(LATENCY_BOUNDS_S)
    assert histogram(*durations_s).counts_by(LATENCY_BOUNDS_S) == expected


@pytest.mark.parametrize("bounds", [LATENCY_BOUNDS_S, WORK_BOUNDS_S, BOUNDS_S])
def test_bounds_grow(bounds: tuple[float, ...]) -> None:
    assert all(lower < upper for lower, upper in pairwise(bounds))


@pytest.mark.parametrize(
    ("value", "bucket"), [(-1.0, 0), (0.0, 0), (1.0, 0), (1.5, 1), (2.0, 1), (2.5, 2)]
)
def test_a_bound_belongs_to_its_bucket(value: float, bucket: int) -> None:
    bounds = (1.0, 2.0)
    made = Histogram(bounds)
    made.add(value)
    assert made.counts_by(bounds).index(1) == bucket == bisect_left(bounds, value)


@given(st.lists(st.tuples(st.floats(0.0, 1e4), st.integers(1, 5))))
def test_nothing_is_lost(values: list[tuple[float, int]]) -> None:
    made = Histogram(LATENCY_BOUNDS_S)
    for value, num in values:
        made.add_many(value, num)
    assert len(made) == sum(num for _, num in values)
    assert made.sum_s == pytest.approx(sum(value * num for value, num in values))
    counts = made.counts_by(LATENCY_BOUNDS_S)
    assert sum(counts) == len(made)
    for limit, below in zip(LATENCY_BOUNDS_S, accumulate(counts), strict=False):
        assert below == sum(num for value, num in values if value <= limit)
