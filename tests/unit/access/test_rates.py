"""Token buckets: what may be begun, and when again."""

from __future__ import annotations

import math

import pytest

from gpupoold.access.rates import Bucket


def test_minute_s_worth_at_once_then_at_its_pace() -> None:
    bucket = Bucket(6, 100.0)
    for _ in range(6):
        assert bucket.wait_s(1, 100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.wait_s(1, 100.0) == 10
    assert bucket.wait_s(1, 105.0) == 5
    assert bucket.wait_s(1, 110.0) == 0
    bucket.take(1, 110.0)
    assert bucket.wait_s(1, 110.0) == 10


def test_debt_is_paid_off_first() -> None:
    bucket = Bucket(60, 0.0)
    bucket.take(90, 0.0)
    assert bucket.level(0.0) == -30
    assert bucket.wait_s(1, 0.0) == 31
    assert bucket.wait_s(1, 31.0) == 0


def test_it_never_holds_more_than_a_minute_s_worth() -> None:
    bucket = Bucket(60, 0.0)
    assert bucket.level(1e6) == 60
    assert Bucket(60, 0.0, level=1e6).level(0.0) == 60
    assert Bucket(60, 0.0, level=-3.0).level(1.0) == -2


def test_more_than_it_can_hold_is_let_through_when_it_is_full() -> None:
    bucket = Bucket(10, 0.0)
    assert bucket.wait_s(50, 0.0) == 0


def test_clock_that_goes_back_fills_nothing() -> None:
    bucket = Bucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.level(90.0) == 0
    assert bucket.level(101.0) == 1


@pytest.mark.parametrize("rate", [0, -1, math.inf, math.nan])
def test_rates_that_make_no_sense(rate: float) -> None:
    with pytest.raises(ValueError, match="rate"):
        Bucket(rate, 0.0)
