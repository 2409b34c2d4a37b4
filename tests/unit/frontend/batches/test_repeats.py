"""When a refused request is asked again, and when its refusal is the result."""

from __future__ import annotations

import pytest

from gpupoold.frontend.batches.work import GIVE_UP_S, MAX_FAILURES, MAX_REFUSALS, Repeats


@pytest.mark.parametrize("status", [200, 400, 404, 413, 422])
def test_results(status: int) -> None:
    repeats = Repeats()
    assert repeats.is_result(0, "m", status, 5.0)
    assert (repeats.due_s(5.0), repeats.reason) == (5.0, "")


def test_pauses_follow_retry_after_grow_and_are_bounded() -> None:
    repeats, now_s = Repeats(), 0.0
    pauses = []
    for _ in range(12):
        assert not repeats.is_result(0, "m", 503, now_s, retry_after_s=3.0, reason="why")
        pauses.append(repeats.due_s(now_s) - now_s)
        now_s = repeats.due_s(now_s)
    assert pauses[:5] == [3, 3, 4, 8, 16]
    assert pauses[-2:] == [300, 300]
    assert not repeats.is_result(1, "n", 429, now_s, retry_after_s=10**6)
    assert not repeats.may_ask(1, "n", now_s + 299)
    assert repeats.may_ask(1, "n", now_s + 300)


def test_a_refusal_holds_the_models_other_requests_back_and_no_others() -> None:
    repeats = Repeats()
    assert not repeats.is_result(0, "bad", 503, 0.0, retry_after_s=20.0, reason="failed")
    assert not repeats.may_ask(1, "bad", 19.0)
    assert repeats.may_ask(1, "good", 0.0)
    assert repeats.may_ask(1, "bad", 20.0)
    assert repeats.reason == "failed"
    assert repeats.is_result(1, "bad", 200, 21.0)
    assert (repeats.reason, repeats.may_ask(2, "bad", 21.0)) == ("", True)


def test_the_next_try_is_when_the_model_may_be_asked_again() -> None:
    repeats = Repeats()
    for number in range(3):
        assert not repeats.is_result(number, "bad", 503, 0.0, retry_after_s=20.0)
    assert repeats.due_s(0.0) == 20.0
    assert not repeats.is_result(0, "bad", 503, 20.0, retry_after_s=20.0)
    assert repeats.due_s(20.0) == 40.0  # also for the others, which were due
    assert not repeats.is_result(9, "odd", 500, 20.0)
    assert repeats.due_s(20.0) == 21.0


def test_a_pass_that_asks_nothing_is_not_repeated_at_once() -> None:
    repeats = Repeats()
    for k in range(6):
        assert not repeats.is_result(0, "bad", 503, float(k))
    assert not repeats.is_result(1, "bad", 503, 5.0)
    assert repeats.due_s(5.0) == 6.0
    assert repeats.is_result(1, "bad", 404, 6.0)
    assert repeats.due_s(6.0) == 37.0


def test_failures_are_repeated_a_few_times_and_hold_no_model() -> None:
    repeats = Repeats()
    results = [repeats.is_result(0, "m", 500, float(k)) for k in range(MAX_FAILURES)]
    assert results == [False] * (MAX_FAILURES - 1) + [True]
    assert (repeats.reason, repeats.due_s(9.0)) == ("", 9.0)


def test_a_request_gives_up_after_many_tries() -> None:
    repeats = Repeats()
    for k in range(MAX_REFUSALS - 1):
        assert not repeats.is_result(0, "m", 503, k / 1000)
        assert repeats.is_result(1, "m", 200, k / 1000)
    assert repeats.is_result(0, "m", 503, 1.0)


def test_a_request_gives_up_after_long_and_later_ones_of_the_model_at_once() -> None:
    repeats = Repeats()
    assert not repeats.is_result(0, "m", 503, 0.0)
    assert repeats.is_result(0, "m", 503, GIVE_UP_S)
    assert repeats.is_result(1, "m", 503, GIVE_UP_S + 1)
    assert repeats.is_result(2, "m", 200, GIVE_UP_S + 2)
    assert not repeats.is_result(3, "m", 503, GIVE_UP_S + 3)


def test_memory_is_of_the_waiting_only() -> None:
    repeats = Repeats()
    for number in range(1000):
        repeats.is_result(number, "m", 500, 0.0)
        repeats.is_result(number, "m", 200, 0.0)
    assert repeats.due_s(0.0) == 0.0
