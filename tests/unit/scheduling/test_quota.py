"""Turn lengths against the closed-form checks C4 to C9 of equations 2 and 3."""

from __future__ import annotations

import math

import pytest

from gpupoold.scheduling.policies.aegaeon import TurnLoad, round_quotas_s


def alpha_of(loads: list[TurnLoad], quotas_s: list[float], switch_s: float) -> float:
    """The round's length over ``W = n_i * q_i``, which is alpha."""
    return (sum(quotas_s) + switch_s) / (quotas_s[0] * loads[0].tokens_per_target)


def test_c4_three_equal_batches() -> None:
    loads = [TurnLoad(0.1, 0.025)] * 3
    assert loads[0].tokens_per_target == 4
    quotas_s = round_quotas_s(loads, 3.0, 3.0)
    assert quotas_s == pytest.approx([3.0, 3.0, 3.0])
    assert alpha_of(loads, quotas_s, 3.0) == pytest.approx(1.0)
    num_tokens = quotas_s[0] / loads[0].step_s
    assert num_tokens == pytest.approx(120)
    assert sum(quotas_s) + 3.0 == pytest.approx(12.0)
    assert num_tokens * 0.1 == pytest.approx(12.0)  # each batch keeps exactly up


def test_c5_longer_turns() -> None:
    loads = [TurnLoad(0.1, 0.025)] * 3
    quotas_s = round_quotas_s(loads, 3.0, 4.0)
    assert quotas_s == pytest.approx([4.0, 4.0, 4.0])
    assert alpha_of(loads, quotas_s, 3.0) == pytest.approx(0.9375)
    assert sum(quotas_s) + 3.0 == pytest.approx(15.0)
    assert 1 / alpha_of(loads, quotas_s, 3.0) == pytest.approx(1.067, abs=5e-4)


def test_c6_unequal_batches() -> None:
    loads = [TurnLoad(0.1, 0.025), TurnLoad(0.1, 0.0125), TurnLoad(0.1, 0.020)]
    assert sum(1 / load.tokens_per_target for load in loads) == pytest.approx(0.575)
    quotas_s = round_quotas_s(loads, 1.5, 4.0)
    assert quotas_s == pytest.approx([4.0, 2.0, 3.2])
    assert alpha_of(loads, quotas_s, 1.5) == pytest.approx(0.66875)
    assert sum(quotas_s) + 1.5 == pytest.approx(10.7)


def test_c7_clamp() -> None:
    loads = [TurnLoad(0.1, 0.01)] * 2
    quotas_s = round_quotas_s(loads, 1.0, 4.0)
    assert alpha_of(loads, quotas_s, 1.0) == pytest.approx(0.5)
    assert quotas_s == pytest.approx([1 / 3, 1 / 3])
    assert sum(quotas_s) + 1.0 == pytest.approx(5 / 3)


@pytest.mark.parametrize("switch_s", [0.01, 1.0, 7.0])
def test_c8_identities(switch_s: float) -> None:
    loads = [TurnLoad(0.1, 0.05), TurnLoad(0.08, 0.02), TurnLoad(0.2, 0.01)]
    quotas_s = round_quotas_s(loads, switch_s, 4.0)
    work = [load.tokens_per_target * quota for load, quota in zip(loads, quotas_s, strict=True)]
    assert work == pytest.approx([work[0]] * 3)
    # need is 0.8: not clamped, so the slowest batch has the longest turn there may be.
    assert max(quotas_s) == pytest.approx(4.0)
    assert quotas_s[0] == max(quotas_s)


def test_c9_free_switching_gives_short_turns_that_keep_up() -> None:
    loads = [TurnLoad(0.1, 0.01), TurnLoad(0.1, 0.02), TurnLoad(0.1, 0.025)]  # need 0.55
    quotas_s = round_quotas_s(loads, 0.0, 4.0)
    assert sum(quotas_s) == pytest.approx(0.1)  # a round takes one token target
    for load, quota_s in zip(loads, quotas_s, strict=True):
        assert quota_s >= load.step_s  # so that each batch makes at least a token in it


def test_c9_free_switching_of_few_or_light_batches() -> None:
    # need 0.1: 0/0 in the equations, 0 with alpha clamped
    assert round_quotas_s([TurnLoad(0.1, 0.01)], 0.0, 4.0) == pytest.approx([0.02])
    # need 2, overloaded: one step each
    loads = [TurnLoad(0.1, 0.1)] * 2
    assert round_quotas_s(loads, 0.0, 4.0) == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("switch_s", [1e-300, 1e-18, 1e-12, 1e-6])
@pytest.mark.parametrize("step_s", [0.001, 0.05, 0.5])
def test_tiny_switching_time_is_no_division_by_zero(switch_s: float, step_s: float) -> None:
    quotas_s = round_quotas_s([TurnLoad(0.1, step_s)] * 2, switch_s, 4.0)
    assert all(0 <= quota_s <= 4.0 * (1 + 1e-9) for quota_s in quotas_s)
    assert all(math.isfinite(quota_s) for quota_s in quotas_s)
