"""How soon a process that cannot be started, or ends, is started again."""

from __future__ import annotations

import asyncio

import pytest

from gpupoold.control.processes.supervised import (
    MAX_S,
    STABLE_AFTER_S,
    Backoff,
    Timing,
    keep_running,
)


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


async def test_starts_that_fail_are_logged_and_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    waits_s: list[float] = []
    runs_again = asyncio.Event()
    errors = [OSError("the fork server could not fork: EAGAIN"), OSError("no socket"), None]

    async def run_once() -> bool:
        error = errors.pop(0)
        if error is not None:
            raise error
        runs_again.set()
        await asyncio.sleep(60)
        return True

    async def sleep(wait_s: float) -> None:
        waits_s.append(wait_s)

    timing = Timing(clock=lambda: 0.0, sleep=sleep)
    task = asyncio.create_task(keep_running("the frontend", run_once, Backoff(), timing))
    async with asyncio.timeout(20):
        await runs_again.wait()
    task.cancel()
    assert waits_s == [0.0, 1.0]
    assert "the frontend could not be started: the fork server could not fork" in caplog.text
    assert "the frontend could not be started: no socket" in caplog.text
