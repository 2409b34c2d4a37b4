"""Minutes added up over spans; causes and advice."""

from __future__ import annotations

import pytest

from gpupool_state import MinuteRow
from gpupoold.control.accounting.model_stats import Counts
from gpupoold.control.views.bodies import ModelSums, Spans, span_s
from gpupoold.control.views.explain import advice, main_cause
from gpupoold.domain import Targets
from gpupoold.durations import Lateness, RequestStages
from gpupoold.stats.histogram import Histogram

TARGETS = Targets(2.0, 0.1)


def minute(minute_at: int, model: str = "m", ttft_s: float = 0.5) -> MinuteRow:
    ttft = Histogram()
    ttft.add(ttft_s)
    return MinuteRow(
        minute_at=minute_at,
        model=model,
        requests=2,
        completed=1,
        aborted=1,
        tokens=4,
        tokens_in_time=3,
        first_tokens=1,
        lateness=Lateness(queueing_s=0.5, computing_s=1.0),
        first_token=RequestStages(queueing_s=0.5),
        between_tokens=RequestStages(kv_s=2.0),
        ttft=ttft.text(),
    )


@pytest.mark.parametrize(
    ("window_s", "expected_s"),
    [(1, 60), (3600, 60), (3601, 300), (86400, 3600), (7 * 86400, 21600), (10**9, 86400)],
)
def test_longer_windows_have_longer_spans(window_s: float, expected_s: int) -> None:
    assert span_s(window_s) == expected_s


def test_minutes_of_all_models_add_up() -> None:
    spans = Spans(300)
    spans.add([minute(600), minute(840, "other", ttft_s=8.0), minute(900)])
    spans.add([minute(600)])
    first, second = spans.infos()
    assert (first.at, first.span_s, second.at) == (600, 300, 900)
    assert (first.requests, first.tokens, first.attainment) == (6, 12, 0.75)
    assert first.ttft_p50_s == pytest.approx(0.5, rel=0.04)
    assert first.ttft_p99_s == pytest.approx(8.0, rel=0.04)
    assert first.tbt_p50_s is None
    assert first.lateness.computing_s == 3.0


def test_stages_add_up_by_span_and_by_model() -> None:
    spans, sums = Spans(300), ModelSums(590.0, 400.0)
    for one in (spans, sums):
        one.add([minute(600), minute(840, "other"), minute(660)])
    [span] = spans.infos()
    assert (span.first_tokens, span.first_token.queueing_s, span.between_tokens.kv_s) == (3, 1.5, 6)
    assert [one.model for one in sums.infos()] == ["m", "other"]
    first = sums.infos()[0]
    assert (first.at, first.span_s, first.requests) == (590.0, 400.0, 4)
    assert first.first_token == RequestStages(queueing_s=1.0)
    assert first.between_tokens == RequestStages(kv_s=4.0)


@pytest.mark.parametrize("sums", [Spans(60), ModelSums(0.0, 60.0)])
def test_a_damaged_row_is_named(sums: Spans | ModelSums) -> None:
    with pytest.raises(ValueError, match="not a histogram: 'x'"):
        sums.add([MinuteRow(minute_at=0, model="m", ttft="x")])


@pytest.mark.parametrize(
    ("cause", "says"),
    [
        ("loading", "gpupool cache pin m"),
        ("queueing", "gpupool plan"),
        ("switching", "gpupool switches --slowest"),
        ("computing", "gpupool set m --tbt"),
    ],
)
def test_advice_against_the_main_cause(cause: str, says: str) -> None:
    counts = Counts(tokens=100, tokens_in_time=50, lateness=Lateness(queueing_s=0.5))
    setattr(counts.lateness, f"{cause}_s", 3.0)
    assert main_cause(counts) == cause
    told = advice("m", TARGETS, counts)
    assert says in told[0]


def test_no_advice_where_all_is_well() -> None:
    assert main_cause(Counts(tokens=10, tokens_in_time=10)) is None
    assert advice("m", TARGETS, Counts()) == []
    assert advice("m", TARGETS, Counts(tokens=1000, tokens_in_time=999)) == []


def test_refusals_are_told_even_where_all_that_was_taken_was_in_time() -> None:
    told = advice("m", TARGETS, Counts(tokens=10, tokens_in_time=10, refused=7, dropped=2))
    assert ["7 requests were refused" in told[0], "2 requests were dropped" in told[1]] == [
        True
    ] * 2
