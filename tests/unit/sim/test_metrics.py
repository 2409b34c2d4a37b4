"""Attainment on cases computed by hand; percentiles, reports, goodput."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from gpupoold.domain import Targets
from gpupoold.sim.metrics import (
    Goodput,
    RequestResult,
    SimPercentiles,
    TokenCount,
    artifact_attainment,
    count_tokens,
    goodput,
    on_schedule_share,
    summarise,
)
from gpupoold.sim.workloads import SimRequest

TARGETS = Targets(3.0, 2.0)


def result(
    *times_s: float,
    num_tokens: int | None = None,
    arrival_s: float = 0.0,
    model: str = "m",
    targets: Targets = TARGETS,
) -> RequestResult:
    wanted = len(times_s) if num_tokens is None else num_tokens
    return RequestResult(SimRequest("r0", model, arrival_s, 1, wanted), targets, times_s)


WORKED_EXAMPLE = (3.0, 6.0, 7.0, 8.0)


def test_the_worked_example() -> None:
    example = result(*WORKED_EXAMPLE)
    assert count_tokens(example) == TokenCount(4, 3)
    assert on_schedule_share(example) == 7 / 8
    assert artifact_attainment(example) == 5 / 8


def test_c21_a_token_meets_its_deadline_or_not() -> None:
    """C21: deadline of token i is arrival + TTFT + i * TBT; late ones do not move later ones."""
    on_the_dot = result(103.0, 105.0, 107.0, arrival_s=100.0)
    assert count_tokens(on_the_dot) == TokenCount(3, 3)
    a_hair_late = result(*(at_s + 1e-9 for at_s in (103.0, 105.0, 107.0)), arrival_s=100.0)
    assert count_tokens(a_hair_late) == TokenCount(3, 0)
    first_late = result(104.0, 105.0, 107.0, arrival_s=100.0)
    assert count_tokens(first_late) == TokenCount(3, 2)
    tokens_early_pay_for_a_pause = result(1.0, 1.0, 1.0, 9.0, 11.0)
    assert count_tokens(tokens_early_pay_for_a_pause) == TokenCount(5, 5)
    all_at_once_at_the_end = result(9.0, 9.0, 9.0, 9.0)
    assert count_tokens(all_at_once_at_the_end) == TokenCount(4, 1)


@pytest.mark.parametrize(
    ("end_s", "due"),
    [(1.0, 1), (4.9, 1), (5.0, 2), (6.9, 2), (7.0, 3), (8.99, 3), (9.0, 4), (1e9, 4)],
)
def test_c21_missing_tokens_are_misses_once_they_are_due(end_s: float, due: int) -> None:
    cut_off = result(1.0, num_tokens=4)  # the others due at 5, 7, 9
    assert count_tokens(cut_off, end_s) == TokenCount(due, 1)


def test_c21_without_an_end_every_missing_token_is_a_miss() -> None:
    assert count_tokens(result(num_tokens=5)) == TokenCount(5, 0)
    assert count_tokens(result(1.0, 2.0, num_tokens=5)) == TokenCount(5, 2)


def test_tokens_that_came_before_they_were_due_count_at_any_end() -> None:
    assert count_tokens(result(1.0, 1.5, 2.0, num_tokens=3), end_s=2.0) == TokenCount(3, 3)


@pytest.mark.parametrize(
    ("times_s", "share"),
    [
        ((3.0, 5.0, 7.0), 1.0),  # each on the dot
        ((1.0, 1.0, 6.9), 1.0),  # two early, the third due at 7
        ((4.0,), 3 / 4),  # due at 3
        ((4.0, 6.0), 5 / 6),  # late, then in time again: due at 4 + 2
        ((4.0, 7.0), 5 / 7),  # late twice, a second each
        ((1.0, 6.0, 8.0, 10.5), 9 / 10.5),  # due at 3, 5; then anew at 8, 10
        ((0.0, 0.0), 1.0),  # no time at all
    ],
)
def test_on_schedule_share_by_hand(times_s: Sequence[float], share: float) -> None:
    assert on_schedule_share(result(*times_s)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("times_s", "end_s", "share"),
    [
        ((), 2.0, 1.0),  # the first is due at 3
        ((), 6.0, 0.5),
        ((1.0,), 5.0, 1.0),  # the second is due at 5
        ((1.0,), 10.0, 0.5),
        ((4.0,), 8.0, 5 / 8),  # one second late, then due at 6
        ((1.0,), math.inf, 0.0),
        ((), math.inf, 0.0),
    ],
)
def test_on_schedule_share_of_requests_cut_off(
    times_s: Sequence[float], end_s: float, share: float
) -> None:
    assert on_schedule_share(result(*times_s, num_tokens=9), end_s) == share


@pytest.mark.parametrize(
    ("times_s", "share"),
    [
        ((3.0, 5.0, 7.0), 1.0),
        ((4.0,), 0.0),  # nothing was in time before it
        ((4.0, 6.0), 2 / 6),  # then the clock starts at 4
        ((4.0, 9.0), 5 / 9),  # and 3 + 2 s are allowed, not 2
        ((4.0, 9.1), 0.0),
        ((1.0, 6.0), 3 / 6),  # kept up to the deadline of the token in time
        ((1.0, 6.0, 13.0, 20.1), 10 / 20.1),  # from 6: 7 s allowed, kept; then 9 s
        ((0.0, 0.0), 1.0),
    ],
)
def test_artifact_attainment_by_hand(times_s: Sequence[float], share: float) -> None:
    assert artifact_attainment(result(*times_s)) == pytest.approx(share)


@pytest.mark.parametrize(
    ("times_s", "end_s", "share"),
    [
        ((), 3.0, 1.0),
        ((), 3.1, 0.0),
        ((1.0,), 5.0, 1.0),
        ((1.0,), 6.0, 3 / 6),
        ((4.0,), 8.0, 4 / 8),
        ((1.0,), math.inf, 0.0),
    ],
)
def test_artifact_attainment_of_requests_cut_off(
    times_s: Sequence[float], end_s: float, share: float
) -> None:
    cut_off = result(*times_s, num_tokens=9)
    assert artifact_attainment(cut_off, end_s) == pytest.approx(share)


def test_a_report() -> None:
    late = result(*WORKED_EXAMPLE, model="b")
    punctual = result(11.0, 12.0, arrival_s=10.0, model="a")
    cut_off = result(21.0, num_tokens=3, arrival_s=20.0, model="a", targets=Targets(1.0, 1.0))
    report = summarise([late, punctual, cut_off], end_s=22.0)
    assert list(report.models) == ["a", "b"]
    overall, a, b = report.overall, report.models["a"], report.models["b"]
    assert (overall.num_requests, overall.num_finished, overall.num_tokens) == (3, 2, 7)
    assert overall.tokens == TokenCount(8, 6)
    assert overall.attainment == 0.75
    assert (a.attainment, b.attainment) == (3 / 4, 3 / 4)
    assert b.on_schedule == 7 / 8
    assert overall.on_schedule == pytest.approx((7 / 8 + 1 + 1) / 3)
    assert overall.artifact == pytest.approx((5 / 8 + 1 + 1) / 3)
    assert b.ttft_s == SimPercentiles(3.0, 3.0)
    assert a.ttft_s.p99 == 1.0
    assert b.tbt_s == SimPercentiles(1.0, 3.0)
    assert overall.tbt_s.p50 == 1.0


def test_a_report_of_nothing() -> None:
    overall = summarise([]).overall
    assert overall.num_requests == 0
    assert (overall.attainment, overall.on_schedule, overall.artifact) == (None, None, None)
    assert overall.tbt_s == SimPercentiles(None, None)
    not_due_yet = summarise([result(num_tokens=2)], end_s=1.0)
    assert not_due_yet.overall.attainment is None


def test_percentiles_are_nearest_ranks() -> None:
    gaps = [number / 128 for number in range(1, 101)]  # exact in binary
    times_s = [sum(gaps[:count]) for count in range(101)]
    assert summarise([result(*times_s)]).overall.tbt_s == SimPercentiles(50 / 128, 99 / 128)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (result(1.0, 2.0, num_tokens=1), "r0: 2 tokens of 1"),
        (result(2.0, 1.0), "times go back"),
        (result(2.0, arrival_s=3.0), "times go back"),
        (result(2.0, 11.0), "times go back"),
        (result(arrival_s=11.0, num_tokens=2), "times go back"),
    ],
)
def test_results_that_cannot_be(wrong: RequestResult, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        summarise([wrong], end_s=10.0)


def test_goodput_lies_where_the_line_crosses() -> None:
    assert goodput([(30, 0.25), (10, 1.0), (20, 0.5)], threshold=0.75) == Goodput(15, False)
    assert goodput([(30, 0.5), (10, 1.0), (20, 0.9)]) == Goodput(20, False)
    assert goodput([(10, 0.99), (20, 0.95)]) == Goodput(20, True)
    assert goodput([(10, 0.89), (20, 0.5)]) is None


def test_goodput_is_the_highest_load_that_passes_even_after_a_dip() -> None:
    points = [(1, 1.0), (2, 0.5), (3, 1.0), (4, 0.5)]
    assert goodput(points, threshold=0.75) == Goodput(3.5, False)


def test_goodput_needs_points_at_distinct_loads() -> None:
    with pytest.raises(ValueError, match="no points"):
        goodput([])
    with pytest.raises(ValueError, match="given twice"):
        goodput([(1, 0.9), (1, 0.8)])


def test_first_tokens_and_gaps_in_time() -> None:
    """TTFT 3 s, TBT 2 s."""
    in_time = result(3.0, 5.0, 7.5)  # one gap of two
    late = result(3.5, 4.5)
    never = result(num_tokens=2)
    summary = summarise([in_time, late, never], 10.0).overall
    assert summary.first_in_time == pytest.approx(1 / 3)
    assert summary.gaps_in_time == pytest.approx(2 / 3)
    not_due_yet = summarise([in_time, result(num_tokens=1, arrival_s=8.0)], 10.0).overall
    assert not_due_yet.first_in_time == 1.0
    nothing = summarise([result(num_tokens=1, arrival_s=8.0)], 10.0).overall
    assert (nothing.first_in_time, nothing.gaps_in_time) == (None, None)
