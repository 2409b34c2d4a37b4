"""Metrics of any request: bounds, punctuality, time shifts, deadlines of the live requests."""

from __future__ import annotations

import itertools
from dataclasses import replace

from hypothesis import given, strategies as st

from gpupoold.domain import Targets
from gpupoold.sim.metrics import (
    RequestResult,
    artifact_attainment,
    count_tokens,
    goodput,
    on_schedule_share,
    summarise,
)
from gpupoold.sim.workloads import SimRequest
from tests.unit.control.live import live_request

# Eighths of a second: exact in binary, so that sums in any order are equal.
EIGHTHS = st.integers(0, 80).map(lambda number: number / 8)
TARGETS = st.builds(Targets, *[st.integers(1, 40).map(lambda number: number / 8)] * 2)


@st.composite
def results(draw: st.DrawFn) -> RequestResult:
    arrival_s, *gaps_s = draw(st.lists(EIGHTHS, min_size=1, max_size=30))
    times_s = list(itertools.accumulate(gaps_s, initial=arrival_s))[1:]
    num_tokens = max(1, len(times_s) + draw(st.integers(0, 5)))
    request = SimRequest("r0", draw(st.sampled_from("abc")), arrival_s, 1, num_tokens)
    return RequestResult(request, draw(TARGETS), times_s)


def end_of(result: RequestResult, later_s: float) -> float:
    return max([result.request.arrival_s, *result.token_times_s]) + later_s


@given(results(), EIGHTHS)
def test_all_metrics_are_shares(result: RequestResult, later_s: float) -> None:
    for end_s in (end_of(result, later_s), float("inf")):
        tokens = count_tokens(result, end_s)
        assert 0 <= tokens.num_in_time <= len(result.token_times_s) <= tokens.num_due
        assert tokens.num_due <= result.request.output_tokens
        assert 0 <= on_schedule_share(result, end_s) <= 1
        assert -1e-12 <= artifact_attainment(result, end_s) <= 1


@given(results())
def test_a_punctual_request_is_whole_by_every_metric(result: RequestResult) -> None:
    due_s = [
        result.targets.deadline_s(result.request.arrival_s, index)
        for index in range(result.request.output_tokens)
    ]
    punctual = replace(result, token_times_s=due_s)
    tokens = count_tokens(punctual)
    assert tokens.num_due == tokens.num_in_time == result.request.output_tokens
    assert on_schedule_share(punctual) == artifact_attainment(punctual) == 1


@given(results(), EIGHTHS)
def test_metrics_do_not_depend_on_when_the_run_began(result: RequestResult, later_s: float) -> None:
    end_s = end_of(result, later_s)
    request = replace(result.request, arrival_s=result.request.arrival_s + 100)
    times_s = [at_s + 100 for at_s in result.token_times_s]
    moved = replace(result, request=request, token_times_s=times_s)
    for metric in (count_tokens, on_schedule_share, artifact_attainment):
        assert metric(moved, end_s + 100) == metric(result, end_s)


@given(results(), EIGHTHS, EIGHTHS)
def test_more_of_an_unfinished_run_only_adds_misses(
    result: RequestResult, later_s: float, still_s: float
) -> None:
    early_end_s = end_of(result, later_s)
    early, late = (count_tokens(result, end_s) for end_s in (early_end_s, early_end_s + still_s))
    assert late.num_in_time == early.num_in_time
    assert late.num_due >= early.num_due


@given(results())
def test_the_daemon_counts_the_same_tokens_in_time(result: RequestResult) -> None:
    live = live_request(arrival_s=result.request.arrival_s, targets=result.targets)
    for at_s in result.token_times_s:
        live.add_tokens([1], at_s)
    assert count_tokens(result).num_in_time == live.num_in_time


@given(st.lists(results(), max_size=8))
def test_a_report_adds_up(many: list[RequestResult]) -> None:
    report = summarise(many)
    counts = [count_tokens(result) for result in many]
    assert report.overall.tokens.num_due == sum(count.num_due for count in counts)
    assert report.overall.tokens.num_in_time == sum(count.num_in_time for count in counts)
    assert report.overall.num_requests == len(many)
    for name in ("num_requests", "num_finished", "num_tokens"):
        parts = sum(getattr(summary, name) for summary in report.models.values())
        assert parts == getattr(report.overall, name)
    assert summarise(reversed(many)) == report


@given(
    st.dictionaries(st.integers(1, 100), st.floats(0, 1), min_size=1, max_size=8),
    st.floats(0.01, 1),
)
def test_goodput_lies_between_the_loads_around_it(
    attainments: dict[int, float], threshold: float
) -> None:
    found = goodput(attainments.items(), threshold)
    passed = [load for load, attainment in attainments.items() if attainment >= threshold]
    assert (found is None) == (not passed)
    if found is not None:
        above = min((load for load in attainments if load > max(passed)), default=max(passed))
        assert max(passed) <= found.load <= above
        assert found.is_lower_bound == (above == max(passed))
