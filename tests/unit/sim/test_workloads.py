"""Poisson workloads: rates, order, repeatability, complaints."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim.lengths import sharegpt_lengths
from gpupoold.sim.workloads import (
    SimRequest,
    equal_rates,
    in_arrival_order,
    model_names,
    poisson_workload,
)
from tests.support.lengths import PairLengths

LENGTHS = PairLengths([(number, 1000 + number) for number in range(1, 500)])


def of_model(requests: tuple[SimRequest, ...], model: str) -> list[tuple[float, int, int]]:
    return [
        (one.arrival_s, one.prompt_tokens, one.output_tokens)
        for one in requests
        if one.model == model
    ]


def test_requests_are_in_order_numbered_and_within_the_duration() -> None:
    requests = poisson_workload(equal_rates(["a", "b"], 5.0), 60.0, LENGTHS, seed=1)
    arrivals_s = [one.arrival_s for one in requests]
    assert arrivals_s == sorted(arrivals_s)
    assert 0 < arrivals_s[0] < arrivals_s[-1] < 60.0
    assert [one.id for one in requests] == [f"r{number}" for number in range(len(requests))]
    assert Counter(one.model for one in requests).keys() == {"a", "b"}


def test_the_seed_decides_and_the_order_of_models_does_not() -> None:
    rates = {"a": 1.0, "b": 2.0, "c": 0.5}
    requests = poisson_workload(rates, 100.0, LENGTHS, seed=3)
    assert poisson_workload(rates, 100.0, LENGTHS, seed=3) == requests
    backwards = dict(reversed(rates.items()))
    assert poisson_workload(backwards, 100.0, LENGTHS, seed=3) == requests
    assert poisson_workload(rates, 100.0, LENGTHS, seed=4) != requests


def test_a_seed_means_the_same_everywhere() -> None:
    """Pinned: a change of these numbers is a change of everyone's published runs."""
    first = poisson_workload({"m00": 0.1}, 60.0, sharegpt_lengths(), seed=0)[0]
    assert (first.model, first.id) == ("m00", "r0")
    assert first.arrival_s == pytest.approx(16.814969, abs=1e-6)
    assert (first.prompt_tokens, first.output_tokens) == (821, 320)


def test_a_model_s_requests_do_not_depend_on_the_other_models() -> None:
    alone = poisson_workload({"a": 1.0}, 100.0, LENGTHS, seed=3)
    together = poisson_workload({"a": 1.0, "b": 2.0}, 100.0, LENGTHS, seed=3)
    assert of_model(together, "a") == of_model(alone, "a")
    assert of_model(together, "b") != of_model(alone, "a")


def test_another_rate_or_duration_leaves_the_lengths_as_they_were() -> None:
    slow = of_model(poisson_workload({"a": 1.0}, 100.0, LENGTHS, seed=3), "a")
    fast = of_model(poisson_workload({"a": 2.0}, 400.0, LENGTHS, seed=3), "a")
    assert len(fast) > len(slow)
    assert [lengths for _, *lengths in fast][: len(slow)] == [lengths for _, *lengths in slow]


def test_gaps_are_exponential_at_the_given_rate() -> None:
    requests = poisson_workload({"a": 4.0}, 10_000.0, LENGTHS, seed=5)
    gaps_s = [
        later.arrival_s - earlier.arrival_s for earlier, later in itertools.pairwise(requests)
    ]
    assert len(requests) == pytest.approx(40_000, rel=0.02)
    assert statistics.mean(gaps_s) == pytest.approx(0.25, rel=0.02)
    assert statistics.stdev(gaps_s) == pytest.approx(0.25, rel=0.03)
    share_above_mean = sum(gap_s > 0.25 for gap_s in gaps_s) / len(gaps_s)
    assert share_above_mean == pytest.approx(math.exp(-1), abs=0.01)


def test_each_model_has_its_own_rate() -> None:
    requests = poisson_workload({"a": 10.0, "b": 1.0}, 1_000.0, LENGTHS, seed=5)
    counts = Counter(one.model for one in requests)
    assert counts["a"] == pytest.approx(10_000, rel=0.05)
    assert counts["b"] == pytest.approx(1_000, rel=0.1)


def test_model_names_sort_as_numbers_do() -> None:
    assert model_names(3) == ["m00", "m01", "m02"]
    names = model_names(101)
    assert names[-1] == "m100"
    assert sorted(names) == names


def test_merging_keeps_order_and_numbers_anew() -> None:
    one = (SimRequest("r0", "a", 1.0, 1, 1), SimRequest("r1", "a", 3.0, 1, 1))
    two = (SimRequest("r0", "b", 0.5, 2, 2), SimRequest("r1", "b", 3.0, 2, 2))
    merged = in_arrival_order((*one, *two))
    assert [(each.id, each.model, each.arrival_s) for each in merged] == [
        ("r0", "b", 0.5),
        ("r1", "a", 1.0),
        ("r2", "a", 3.0),
        ("r3", "b", 3.0),
    ]
    assert in_arrival_order(()) == ()


@pytest.mark.parametrize("rate_rps", [0, -1.0, math.nan, math.inf])
def test_rates_must_be_positive(rate_rps: float) -> None:
    with pytest.raises(UsageError, match=r"model 'b': rate .* requests/s: must be above 0"):
        poisson_workload({"a": 1.0, "b": rate_rps}, 10.0, LENGTHS, seed=0)
    with pytest.raises(UsageError, match="must be above 0"):
        equal_rates(["a"], rate_rps)


@pytest.mark.parametrize("duration_s", [0, -5.0, math.nan, math.inf])
def test_durations_must_be_positive(duration_s: float) -> None:
    with pytest.raises(UsageError, match=r"duration .* s: must be above 0"):
        poisson_workload({"a": 1.0}, duration_s, LENGTHS, seed=0)


def test_other_errors() -> None:
    with pytest.raises(UsageError, match="no models: at least one is needed"):
        equal_rates([], 1.0)
    with pytest.raises(UsageError, match="no models"):
        poisson_workload({}, 1.0, LENGTHS, seed=0)
    with pytest.raises(UsageError, match="0 models: at least one"):
        model_names(0)
    with pytest.raises(UsageError, match="model 'a' is named 2 times"):
        equal_rates(["a", "b", "a"], 1.0)
    with pytest.raises(UsageError, match=r"about 1e\+12 requests"):
        poisson_workload({"a": 1e6}, 1e6, LENGTHS, seed=0)


def test_ten_minutes_of_seventy_models() -> None:
    rates = equal_rates(model_names(70), 0.1)
    requests = poisson_workload(rates, 600.0, sharegpt_lengths(), seed=1)
    assert len(requests) == pytest.approx(4_200, rel=0.1)
