"""How soon what has ended is started again."""

from __future__ import annotations

from gpupoold.control.processes.backoff import MAX_S, STABLE_AFTER_S, Backoff


def test_the_first_restart_is_immediate_and_later_ones_wait_longer() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0) for _ in range(5)] == [0, 1, 2, 4, 8]


def test_it_never_waits_longer_than_the_limit() -> None:
    backoff = Backoff()
    assert max(backoff.after(0.1) for _ in range(20)) == MAX_S


def test_a_stable_run_is_a_new_beginning() -> None:
    backoff = Backoff()
    for _ in range(4):
        backoff.after(1.0)
    assert [backoff.after(ran_s) for ran_s in (STABLE_AFTER_S, 1.0)] == [0, 1]


def test_what_somebody_else_ended_neither_waits_nor_counts() -> None:
    backoff = Backoff()
    assert [backoff.after(1.0, is_excused=True) for _ in range(9)] == [0] * 9
    assert [backoff.after(1.0) for _ in range(3)] == [0, 1, 2]
    assert backoff.after(1.0, is_excused=True) == 0
    assert backoff.after(1.0) == 4


def test_limit_may_be_lower() -> None:
    backoff = Backoff(max_s=1.0)
    assert [backoff.after(0.1) for _ in range(4)] == [0, 1, 1, 1]
