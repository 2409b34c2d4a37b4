"""Quotas and round limits for any load: finite, positive, proportional, bounded."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from gpupoold.scheduling.policies.aegaeon import TurnLoad, round_quotas_s

SECONDS = st.floats(1e-5, 1e3)
LOADS = st.lists(st.builds(TurnLoad, SECONDS, SECONDS), min_size=1, max_size=8)


@given(LOADS, st.floats(0, 1e4), st.floats(1e-3, 100))
def test_quotas_are_positive_finite_and_bounded(
    loads: list[TurnLoad], switch_s: float, quota_max_s: float
) -> None:
    quotas_s = round_quotas_s(loads, switch_s, quota_max_s)
    assert all(math.isfinite(quota_s) and quota_s > 0 for quota_s in quotas_s)
    if switch_s >= 1e-9:  # less counts as none
        assert max(quotas_s) <= quota_max_s * (1 + 1e-9)


@given(LOADS, st.floats(1e-6, 1e4), st.floats(1e-3, 100))
def test_quotas_follow_the_printed_equations(
    loads: list[TurnLoad], switch_s: float, quota_max_s: float
) -> None:
    counts = [load.tokens_per_target for load in loads]
    need = sum(1 / count for count in counts)
    alpha = max(switch_s / (min(counts) * quota_max_s) + need, 0.5)
    quotas_s = round_quotas_s(loads, switch_s, quota_max_s)
    if alpha - need > 1e-6 * alpha:  # else the printed form loses its digits
        expected = [switch_s / (count * (alpha - need)) for count in counts]
        assert quotas_s == pytest.approx(expected, rel=1e-6)
        assert sum(quotas_s) + switch_s == pytest.approx(alpha * counts[0] * quotas_s[0], rel=1e-6)


@given(LOADS)
def test_free_switching_keeps_rounds_short(loads: list[TurnLoad]) -> None:
    quotas_s = round_quotas_s(loads, 0.0, 4.0)
    steps_s = [load.step_s for load in loads]
    for load, quota_s in zip(loads, quotas_s, strict=True):
        assert load.step_s <= quota_s <= 2 * load.step_s * (1 + 1e-9)
    # A round takes the shortest target, or one step each where that is longer.
    shortest_s = min(load.tbt_s for load in loads)
    assert sum(quotas_s) <= (shortest_s + sum(steps_s)) * (1 + 1e-9)
