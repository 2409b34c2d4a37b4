"""A law that follows its machine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gpupoold.latency.errors import LatencyError
from gpupoold.latency.models import DecodeBatch, LinearDecode, LinearPrefill
from gpupoold.latency.online import OnlineFit, OnlineSettings

START = LinearDecode(context_s=1e-7, sequence_s=1e-4, base_s=0.009)
GRID = [DecodeBatch(b, b * c) for b in (1, 4, 16, 64) for c in (64, 512, 4096)]


def feed(online: OnlineFit[Any], true: LinearDecode, rounds: int) -> None:
    for i in range(rounds):
        batch = GRID[(i * 7) % len(GRID)]
        online.observe(batch, true.predict_s(batch))


def worst_error(law: LinearDecode, true: LinearDecode) -> float:
    return max(abs(law.predict_s(batch) / true.predict_s(batch) - 1) for batch in GRID)


def test_nothing_changes_while_it_is_right() -> None:
    online = OnlineFit(START)
    feed(online, START, 500)
    assert online.law.constants == pytest.approx(START.constants, rel=1e-9)
    assert online.num_observations == 500


def test_it_learns_another_machine() -> None:
    true = LinearDecode(context_s=2e-7, sequence_s=0.7e-4, base_s=0.012)
    online = OnlineFit(START)
    assert worst_error(online.law, true) > 0.25
    feed(online, true, 300)
    assert worst_error(online.law, true) < 0.02
    assert online.law.constants == pytest.approx(true.constants, rel=0.1)


def test_it_follows_a_later_change_too() -> None:
    online = OnlineFit(START)
    feed(online, START, 5000)
    slower = LinearDecode(*(1.5 * constant for constant in START.constants))
    feed(online, slower, 600)
    assert worst_error(online.law, slower) < 0.1
    feed(online, slower, 600)
    assert worst_error(online.law, slower) < 0.02


def test_a_stall_does_little() -> None:
    online = OnlineFit(START)
    feed(online, START, 200)
    assert online.observe(GRID[5], 60.0) > 1000
    assert worst_error(online.law, START) < 0.02
    feed(online, START, 100)
    assert worst_error(online.law, START) < 0.01


def test_constants_stay_within_bounds_whatever_comes() -> None:
    settings = OnlineSettings(max_change=2.0)
    online = OnlineFit(START, settings)
    for _ in range(2000):
        online.observe(GRID[0], 1e3)
    for now, then in zip(online.law.constants, START.constants, strict=True):
        assert then / 2 <= now <= 2 * then
    for _ in range(5000):
        online.observe(GRID[-1], 1e-9)
    for now, then in zip(online.law.constants, START.constants, strict=True):
        assert then / 2 <= now <= 2 * then


def test_a_constant_fitted_as_zero_can_grow() -> None:
    online = OnlineFit(LinearDecode(context_s=0.0, sequence_s=1e-4, base_s=0.009))
    feed(online, START, 400)
    assert worst_error(online.law, START) < 0.05
    assert online.law.context_s > 0


def test_one_kind_of_step_for_hours_does_not_unlearn_the_others() -> None:
    online = OnlineFit(START)
    for _ in range(20_000):
        online.observe(GRID[0], START.predict_s(GRID[0]) * 1.05)
    assert online.law.predict_s(GRID[0]) == pytest.approx(START.predict_s(GRID[0]) * 1.05, rel=0.01)
    assert worst_error(online.law, START) < 0.15


@pytest.mark.parametrize("duration_s", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_ignored(duration_s: float) -> None:
    online = OnlineFit(START)
    assert online.observe(GRID[0], duration_s) == 0.0
    assert online.observe(DecodeBatch(0, 0), 0.01) == 0.0
    assert online.law == START
    assert online.num_observations == 0


@pytest.mark.parametrize("law", [LinearPrefill(), LinearPrefill(1e-5, -0.001)])
def test_only_a_sound_fit_can_be_refined(law: LinearPrefill) -> None:
    with pytest.raises(LatencyError, match="can be refined"):
        OnlineFit(law)


@pytest.mark.parametrize(
    "change", [{"half_life": 0}, {"max_error": 0}, {"max_change": 1}, {"uncertainty": -1}]
)
def test_settings_are_checked(change: dict[str, float]) -> None:
    with pytest.raises(LatencyError, match="max_change above 1"):
        OnlineSettings(**change)
