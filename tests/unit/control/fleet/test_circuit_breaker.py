"""When a model is shut out, for how long, and when it is tried again."""

from __future__ import annotations

import pytest

from gpupoold.control.fleet.states import (
    FIRST_WAIT_S,
    MAX_CONVICTED,
    MAX_WAIT_S,
    WINDOW_S,
    CircuitBreakers,
)
from gpupoold.control.processes.supervised import Death
from gpupoold.system.activity import Activity, ThreadPhase

CRASH = Death("signal 11", True, (Activity(ThreadPhase.LOAD, "llama"),))


@pytest.fixture
def breakers() -> CircuitBreakers:
    return CircuitBreakers()


def shut_out(breakers: CircuitBreakers, now_s: float) -> float:
    """Two crashes; when the model is tried again."""
    breakers.record_crash("llama", 0, CRASH, now_s)
    assert breakers.record_crash("llama", 0, CRASH, now_s) is not None
    retry_at_s = breakers.retry_at_s("llama")
    assert retry_at_s is not None
    return retry_at_s


def test_two_crashes_within_the_window(breakers: CircuitBreakers) -> None:
    assert breakers.record_crash("llama", 0, CRASH, 100.0) is None
    assert (breakers.reason("llama"), breakers.retry_at_s("llama")) == (None, None)
    reason = breakers.record_crash("llama", 0, CRASH, 99.0 + WINDOW_S)
    assert reason == "ended the worker of device 0 twice: signal 11, in the load of llama"
    assert breakers.reason("llama") == reason
    assert breakers.is_shut_out("llama")
    assert breakers.retry_at_s("llama") == 99.0 + WINDOW_S + FIRST_WAIT_S
    assert breakers.record_crash("llama", 0, CRASH, 800.0) is None, "it is shut out already"


def test_on_whichever_devices(breakers: CircuitBreakers) -> None:
    breakers.record_crash("llama", 3, CRASH, 1.0)
    reason = breakers.record_crash("llama", 1, Death("out of memory", True), 2.0)
    assert reason == "ended the workers of devices 1 and 3: out of memory"


def test_crashes_long_apart_or_of_others(breakers: CircuitBreakers) -> None:
    for at_s in (0.0, WINDOW_S, 2 * WINDOW_S):
        assert breakers.record_crash("llama", 0, CRASH, at_s) is None
    assert breakers.record_crash("qwen", 0, CRASH, 2 * WINDOW_S) is None


def test_waits_grow_until_an_hour(breakers: CircuitBreakers) -> None:
    now_s, waits = 0.0, []
    retry_at_s = shut_out(breakers, now_s)
    for _ in range(9):
        waits.append(retry_at_s - now_s)
        assert breakers.due(retry_at_s - 0.1) == []
        assert breakers.due(retry_at_s) == ["llama"]
        breakers.half_open("llama")
        assert breakers.reason("llama") is None, "it may be loaded"
        assert breakers.is_shut_out("llama"), "by nobody else"
        now_s = retry_at_s + 1.0
        assert "again" in (breakers.record_crash("llama", 0, CRASH, now_s) or "")
        retry_at_s = breakers.retry_at_s("llama") or 0.0
    assert waits == [30.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, MAX_WAIT_S, MAX_WAIT_S]


def test_a_model_that_works_is_served_again(breakers: CircuitBreakers) -> None:
    retry_at_s = shut_out(breakers, 0.0)
    assert not breakers.close("llama", 1.0), "a load that had begun before"
    breakers.half_open("llama")
    assert breakers.close("llama", retry_at_s)
    assert not breakers.is_shut_out("llama")
    assert breakers.retry_at_s("llama") is None
    # A crash soon afterwards is one too many, and the wait is longer.
    assert breakers.record_crash("llama", 0, CRASH, retry_at_s + 60.0) is not None
    assert breakers.retry_at_s("llama") == retry_at_s + 60.0 + 2 * FIRST_WAIT_S


def test_waits_begin_anew_after_a_quiet_time(breakers: CircuitBreakers) -> None:
    retry_at_s = shut_out(breakers, 0.0)
    breakers.half_open("llama")
    breakers.close("llama", retry_at_s)
    later_s = retry_at_s + WINDOW_S + 1.0
    assert breakers.record_crash("llama", 0, CRASH, later_s) is None
    assert breakers.record_crash("llama", 0, CRASH, later_s) is not None
    assert breakers.retry_at_s("llama") == later_s + FIRST_WAIT_S


def test_a_retry_that_tells_nothing_is_made_again(breakers: CircuitBreakers) -> None:
    retry_at_s = shut_out(breakers, 0.0)
    breakers.half_open("llama")
    breakers.postpone("llama", retry_at_s)
    assert breakers.due(retry_at_s + FIRST_WAIT_S) == ["llama"]
    breakers.half_open("llama")
    breakers.record_crash("llama", 0, CRASH, 100.0)
    breakers.postpone("llama", 100.0)
    assert breakers.retry_at_s("llama") == 100.0 + 2 * FIRST_WAIT_S, "that told something"


def test_requests_in_a_row(breakers: CircuitBreakers) -> None:
    for number in range(MAX_CONVICTED - 1):
        assert breakers.record_convicted("llama", f"{number}", 1.0) is None
    assert breakers.record_convicted("llama", "0", 1.0) is None, "the same again"
    assert breakers.record_convicted("llama", "more", 1.0) is not None
    assert breakers.is_shut_out("llama")


def test_requests_that_crash_among_others_that_do_not(breakers: CircuitBreakers) -> None:
    for number in range(20):
        assert breakers.record_convicted("llama", f"{number}", 1.0) is None
        breakers.answered("llama")
    breakers.answered("never seen")


def test_a_model_that_could_not_be_loaded(breakers: CircuitBreakers) -> None:
    breakers.open("llama", "no such file", 0.0, is_blocking=False)
    assert breakers.reason("llama") is None, "a worker that comes up may try"
    assert not breakers.is_shut_out("llama")
    assert breakers.due(FIRST_WAIT_S) == ["llama"]
    assert breakers.close("llama", 5.0), "one has loaded it"
    assert breakers.due(FIRST_WAIT_S) == []


def test_all_is_forgotten(breakers: CircuitBreakers) -> None:
    shut_out(breakers, 0.0)
    breakers.reset("llama")
    assert not breakers.is_shut_out("llama")
    assert breakers.record_crash("llama", 0, CRASH, 3.0) is None
    assert breakers.record_crash("llama", 0, CRASH, 4.0) is not None
    breakers.reset("never seen")
