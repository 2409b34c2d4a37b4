"""Jobs of other threads on the turn thread: calls, slices, and holds."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from gpupoold.system.activity import WORKER, ThreadPhase
from gpupoold.worker.threads import TurnThread, finish


@pytest.fixture
def turns() -> TurnThread:
    """The turn thread is the test's."""
    return TurnThread()


@pytest.fixture
def beside() -> Iterator[Callable[..., Future[Any]]]:
    """Starts a function on another thread."""
    with ThreadPoolExecutor(2) as threads:
        yield threads.submit


def serve(turns: TurnThread, until: Future[Any]) -> Any:
    """Run jobs as the turn loop does, until another thread's work has ended."""
    while not until.done():
        if turns.has_jobs:
            turns.run(0.0)
    return until.result()


def numbers(ran_in: list[int]) -> Generator[None, None, str]:
    for _ in range(3):
        ran_in.append(threading.get_ident())
        yield
    return "done"


def test_a_call_runs_on_the_turn_thread(
    turns: TurnThread, beside: Callable[..., Future[Any]]
) -> None:
    assert serve(turns, beside(turns.call, threading.get_ident)) == threading.get_ident()
    assert turns.call(threading.get_ident) == threading.get_ident()


def test_an_error_is_raised_where_the_job_comes_from(
    turns: TurnThread, beside: Callable[..., Future[Any]]
) -> None:
    def fail() -> None:
        raise ValueError("no pages")

    with pytest.raises(ValueError, match="no pages"):
        serve(turns, beside(turns.call, fail))
    assert not turns.has_jobs


def test_slices_run_one_at_a_time_and_in_turn(
    turns: TurnThread, beside: Callable[..., Future[Any]]
) -> None:
    ran_in: list[int] = []
    ends = [
        beside(turns.run_slices, numbers(ran_in), ThreadPhase.PROFILE, "model") for _ in range(2)
    ]
    while len(turns._jobs) < 2:
        pass
    turns.run(0.0)
    assert len(ran_in) == 1
    assert WORKER.main.phase == ThreadPhase.IDLE, "a step may follow"
    turns.run(1.0)
    assert [end.result() for end in ends] == ["done", "done"]
    assert set(ran_in) == {threading.get_ident()}
    assert len(ran_in) == 6


def test_on_the_turn_thread_slices_run_at_once(turns: TurnThread) -> None:
    assert turns.run_slices(numbers([]), ThreadPhase.PROFILE, "model") == "done"
    assert finish(numbers([])) == "done"


def test_a_holder_runs_alone_and_gives_way(
    turns: TurnThread, beside: Callable[..., Future[Any]]
) -> None:
    order: list[str] = []

    def load() -> None:
        with turns.held():
            assert turns.is_held
            turns.call(order.append, "held")  # by the holder itself
            turns.give_way()
            order.append("held again")
        assert not turns.is_held

    def other() -> None:
        turns.call(order.append, "other")

    loading = beside(load)
    while not turns.has_jobs:
        pass
    waiting = beside(other)
    while len(turns._jobs) < 2:
        pass
    serve(turns, loading)
    serve(turns, waiting)
    assert order[0] == "held"
    assert sorted(order) == ["held", "held again", "other"]


def test_the_turn_thread_gives_signs_of_life_while_held(beside: Callable[..., Future[Any]]) -> None:
    alive = threading.Event()
    turns = TurnThread(keep_alive=alive.set)

    def load() -> None:
        with turns.held():
            assert alive.wait(10.0)

    serve(turns, beside(load))


def test_a_fatal_error_of_another_thread_ends_the_turn_loop(
    turns: TurnThread, beside: Callable[..., Future[Any]]
) -> None:
    beside(turns.fail, MemoryError("no memory")).result()
    assert turns.has_jobs
    with pytest.raises(MemoryError, match="no memory"):
        turns.run(0.0)
