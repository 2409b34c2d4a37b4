"""Counts and latencies per model, totals over switches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.control.accounting.model_stats import NUM_MINUTES, Counts, ModelStats, SwitchStats
from gpupoold.domain import FinishReason, Percentiles
from tests.unit.control.live import live_request
from tests.unit.wire.samples import SWITCH


def serve(model: ModelStats, *times_s: float) -> None:
    """A request that came at 0 and gets a token at each of these times."""
    live = live_request()
    for at_s in times_s:
        model.add_tokens(live, [1], at_s)


def test_nothing_yet() -> None:
    model = ModelStats()
    assert model.now.is_empty
    assert model.so_far() == model.last_hour() == Counts()
    assert model.so_far().attainment is None
    assert model.attainment_1m(5.0) is None
    assert model.attainment_minutes() == [None] * NUM_MINUTES
    assert model.tokens_per_s(5.0) == 0.0


def test_tokens_count_when_they_go_out() -> None:
    model, live = ModelStats(), live_request()
    model.add_tokens(live, [7], 0.5)
    model.add_tokens(live, [], 0.6)
    model.add_tokens(live, [8, 9], 1.75)  # due at 1.5 and at 2.0
    assert live.output_token_ids == [7, 8, 9]
    now = model.so_far()
    assert (now.tokens, now.tokens_in_time, now.completed) == (3, 2, 0)
    now = model.last_hour()
    assert now.ttft.percentile(0.5) == pytest.approx(0.5, rel=0.037)
    assert len(now.tbt) == 2
    assert now.tbt.percentile(0.5) == 0.0, "two tokens of one step have no time between them"
    assert now.tbt.percentile(0.99) == pytest.approx(1.25, rel=0.037)


def test_a_pooling_result_counts_as_a_token_without_an_id() -> None:
    model, live = ModelStats(), live_request()
    assert model.add_tokens(live, [], 0.5, has_result=True) == 0.0
    now = model.so_far()
    assert (now.tokens, now.tokens_in_time) == (1, 1)
    assert (live.output_token_ids, live.ttft_s, live.num_in_time) == ([], 0.5, 1)
    assert live.order_now().output_token_ids == []
    late = live_request()
    assert model.add_tokens(late, [], 100.0, has_result=True) > 0
    assert model.so_far().tokens_in_time == 1


def test_percentiles_of_the_hour_are_counted_anew_when_a_hundredth_more_has_come() -> None:
    model, live = ModelStats(), live_request()
    assert model.hour_percentiles() == Percentiles()
    assert model.hour_attainment() is None
    for number in range(1, 201):
        model.add_tokens(live, [1], 0.5 * number)
    before = model.hour_percentiles()
    assert before == model.last_hour().percentiles()
    assert before.tbt_p99_s == pytest.approx(0.5, rel=0.037)
    model.add_tokens(live, [1], 110.0)
    assert model.hour_percentiles() is before
    model.add_tokens(live, [1], 120.0)
    model.add_tokens(live, [1], 130.0)
    assert model.hour_percentiles().tbt_p99_s == pytest.approx(10.0, rel=0.074)
    assert model.hour_attainment() == model.last_hour().attainment
    model.minute_over(NUM_MINUTES + 1)
    assert model.hour_attainment() is None


def test_requests_count_by_how_they_ended() -> None:
    model = ModelStats()
    for reason in FinishReason:
        model.end(reason)
    now = model.so_far()
    assert (now.completed, now.aborted, now.failed) == (2, 1, 1)
    assert not now.is_empty


def test_minutes_pass_and_the_hour_forgets_them() -> None:
    model = ModelStats()
    serve(model, 0.5, 1.0, 2.75)
    assert model.attainment_minutes()[-1] == 0.6667
    over = model.minute_over()
    assert over.tokens == 3
    assert model.now.is_empty
    serve(model, 9.0)
    assert model.attainment_minutes()[-3:] == [None, 0.6667, 0.0]
    assert model.last_hour().attainment == 0.5
    for _ in range(NUM_MINUTES - 2):
        model.minute_over()
    assert model.attainment_minutes()[:3] == [0.6667, 0.0, None]
    assert model.last_hour().tokens == 4
    model.minute_over()
    assert model.attainment_minutes()[:2] == [0.0, None]
    assert model.last_hour().tokens == 1
    assert model.so_far().tokens == 4
    assert len(model.attainment_minutes()) == NUM_MINUTES


@pytest.mark.parametrize(("num_minutes", "num_left"), [(58, 1), (59, 1), (60, 0), (10**6, 0)])
def test_minutes_that_were_slept_through_are_empty(num_minutes: int, num_left: int) -> None:
    model = ModelStats()
    serve(model, 0.5)
    model.minute_over(num_minutes)
    values = model.attainment_minutes()
    assert len(values) == NUM_MINUTES
    assert values.count(1.0) == model.last_hour().tokens == num_left
    assert model.so_far().tokens == 1


def test_an_earlier_hour_is_remembered() -> None:
    model = ModelStats()
    earlier = [Counts(tokens=4, tokens_in_time=number % 5) for number in range(NUM_MINUTES - 1)]
    model.remember(earlier)
    assert model.last_hour().tokens == 4 * (NUM_MINUTES - 1)
    assert model.attainment_minutes()[:3] == [0.0, 0.25, 0.5]
    assert model.so_far().tokens == 0, "that was before the start"


def test_the_last_minute_slides() -> None:
    model = ModelStats()
    seen = []
    for second in range(121):
        model.second_over(float(second))
        seen.append(model.attainment_1m(float(second)))
        serve(model, 0.5 if second < 50 else 9.0)  # in time, later on late
    assert seen[0] is None
    assert seen[30] == 1.0
    assert seen[55] == pytest.approx(50 / 55)
    assert seen[80] == pytest.approx(30 / 60)
    assert seen[110] == seen[120] == 0.0


def test_a_rate_over_ten_seconds() -> None:
    model = ModelStats()
    for second in range(30):
        serve(model, *[1.0] * (second % 2) * 6)
        model.second_over(float(second))
        assert model.tokens_per_s(float(second)) <= 6.0
    assert model.tokens_per_s(29.0) == pytest.approx(3.0)
    for second in range(30, 45):
        model.second_over(float(second))
    assert model.tokens_per_s(44.0) == 0.0


def test_the_rate_of_a_model_that_has_just_begun() -> None:
    model = ModelStats()
    serve(model, *[1.0] * 5)
    assert model.tokens_per_s(100.0) == 5.0
    model.second_over(100.0)
    serve(model, *[1.0] * 5)
    assert model.tokens_per_s(101.0) == pytest.approx(5.0)
    assert model.attainment_1m(101.0) == 1.0


def test_switches_add_up() -> None:
    switches = SwitchStats()
    switches.add(SWITCH)
    switches.add(replace(SWITCH, total_s=1.0, weight_bytes=0))
    assert switches.count == 2
    assert switches.moved_bytes == (1 << 33) + 2 * 15
    assert switches.seconds == {
        "total": 1.75,
        "evict": 0.25,
        "map": 0.5,
        "weights": 0.5,
        "kv": 0.25,
    }
    assert SwitchStats().count == 0
