"""Workloads and traces for any input: order, ids, repeatability, no surprise errors."""

from __future__ import annotations

import io
from collections import Counter
from itertools import chain

from hypothesis import given, settings, strategies as st

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import parse_table
from gpupoold.sim.traces import fold_models, trace_requests
from gpupoold.sim.workloads import SimRequest, in_arrival_order, poisson_workload
from tests.support.lengths import PairLengths

LENGTHS = PairLengths([(number, 100 - number) for number in range(1, 100)])
RATES = st.dictionaries(st.text("abc", min_size=1, max_size=3), st.floats(0.01, 5), min_size=1)
REQUESTS = st.lists(
    st.builds(
        SimRequest,
        st.just("r0"),
        st.sampled_from("abcdef"),
        st.floats(0, 1e6),
        st.integers(1, 9),
        st.integers(1, 9),
    ),
    max_size=30,
)


def assert_in_order(requests: tuple[SimRequest, ...]) -> None:
    arrivals_s = [one.arrival_s for one in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert [one.id for one in requests] == [f"r{number}" for number in range(len(requests))]


def contents(requests: tuple[SimRequest, ...] | list[SimRequest]) -> Counter[tuple[object, ...]]:
    return Counter(
        (one.model, one.arrival_s, one.prompt_tokens, one.output_tokens) for one in requests
    )


@settings(max_examples=50)
@given(RATES, st.floats(0.1, 60), st.integers())
def test_poisson_workloads(rates_rps: dict[str, float], duration_s: float, seed: int) -> None:
    requests = poisson_workload(rates_rps, duration_s, LENGTHS, seed)
    assert_in_order(requests)
    assert all(0 <= one.arrival_s < duration_s for one in requests)
    assert {one.model for one in requests} <= rates_rps.keys()
    assert (
        poisson_workload(dict(reversed(rates_rps.items())), duration_s, LENGTHS, seed) == requests
    )
    parts = [poisson_workload({m: r}, duration_s, LENGTHS, seed) for m, r in rates_rps.items()]
    assert contents(in_arrival_order(chain(*parts))) == contents(requests)


@given(st.lists(REQUESTS, max_size=4))
def test_merging_loses_nothing(workloads: list[list[SimRequest]]) -> None:
    merged = in_arrival_order(chain(*workloads))
    assert_in_order(merged)
    assert contents(merged) == sum((contents(one) for one in workloads), Counter())


@given(REQUESTS, st.integers(1, 8))
def test_folding_keeps_requests_of_a_model_together(
    requests: list[SimRequest], num_models: int
) -> None:
    folded = fold_models(requests, num_models)
    assert [one.arrival_s for one in folded] == [one.arrival_s for one in requests]
    target = {before.model: after.model for before, after in zip(requests, folded, strict=True)}
    assert [target[one.model] for one in requests] == [one.model for one in folded]
    assert len(set(target.values())) == min(num_models, len(target))


@given(REQUESTS)
def test_a_trace_comes_back_as_it_was_written(requests: list[SimRequest]) -> None:
    ordered = in_arrival_order(requests)
    text = "output_tokens,arrival_s,model,prompt_tokens\n" + "".join(
        f"{one.output_tokens},{one.arrival_s!r},{one.model},{one.prompt_tokens}\n"
        for one in ordered
    )
    if ordered:
        assert trace_requests(parse_table(io.StringIO(text), "t.csv")) == ordered


CELL = st.one_of(st.text(max_size=6), st.sampled_from(["0", "1", "1.5", "-1", '"', "nan", "1e9"]))
HEADERS = st.sampled_from(["arrival_s,prompt_tokens,output_tokens", "arrival_s,model", "#", ""])


@given(HEADERS, st.lists(st.lists(CELL, max_size=5).map(",".join), max_size=5))
def test_any_text_is_a_trace_or_a_complaint_of_one_line(header: str, lines: list[str]) -> None:
    text = "\n".join([header, *lines])
    failure_reason = ""
    requests: tuple[SimRequest, ...] = ()
    try:
        requests = trace_requests(parse_table(io.StringIO(text, newline=""), "t.csv"))
    except UsageError as error:
        failure_reason = str(error)
    assert bool(failure_reason) != bool(requests)
    assert failure_reason.startswith("t.csv: " if failure_reason else "")
    assert "\n" not in failure_reason
    assert_in_order(requests)
