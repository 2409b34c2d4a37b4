"""The page that tells what a worker was doing when it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gpupoold.system.activity import (
    NUM_SLOTS,
    PAGE_BYTES,
    Activity,
    ActivityPage,
    ThreadPhase,
    create_page,
    digest,
    read_page,
)


@pytest.fixture
def fd() -> Iterator[int]:
    page = create_page()
    yield page
    os.close(page)


@pytest.fixture
def page(fd: int) -> ActivityPage:
    page = ActivityPage()
    page.attach(os.dup(fd))
    return page


def test_an_idle_page_tells_of_nothing(fd: int, page: ActivityPage) -> None:
    assert read_page(fd) == []
    assert os.fstat(fd).st_size == PAGE_BYTES
    assert page.is_alone


def test_what_is_done_can_be_read(fd: int, page: ActivityPage) -> None:
    with page.main.doing(ThreadPhase.LOAD, "llama"):
        assert read_page(fd) == [Activity(ThreadPhase.LOAD, "llama")]
        with page.main.doing(ThreadPhase.SELF_CHECK, "llama"):
            assert read_page(fd) == [Activity(ThreadPhase.SELF_CHECK, "llama")]
        assert read_page(fd) == [Activity(ThreadPhase.LOAD, "llama")]
    assert read_page(fd) == []


def test_an_exception_leaves_what_was_done(fd: int, page: ActivityPage) -> None:
    with pytest.raises(KeyError), page.main.doing(ThreadPhase.ADD_REQUEST, "llama", ["a"]):
        raise KeyError
    assert read_page(fd) == [Activity(ThreadPhase.ADD_REQUEST, "llama", frozenset({digest("a")}))]
    page.main.clear()
    assert read_page(fd) == []


def test_two_steps_may_be_under_way(fd: int, page: ActivityPage) -> None:
    page.begin_step("llama", ["a", "b"])
    page.begin_step("llama", ["b"])
    steps = read_page(fd)
    assert {one.requests for one in steps} == {
        frozenset({digest("a"), digest("b")}),
        frozenset({digest("b")}),
    }
    page.end_steps(num_under_way=1)
    assert read_page(fd) == [Activity(ThreadPhase.STEP, "llama", frozenset({digest("b")}))]
    page.end_steps()
    assert read_page(fd) == []
    page.begin_step("llama", ["a", "b"])
    assert read_page(fd)[0].requests == frozenset({digest("a"), digest("b")})


def test_until_its_requests_are_chosen_any_may_come_into_a_step(
    fd: int, page: ActivityPage
) -> None:
    page.begin_scheduling("llama")
    assert read_page(fd) == [Activity(ThreadPhase.STEP, "llama", None)]
    page.begin_step("llama", ["a"])
    assert read_page(fd) == [Activity(ThreadPhase.STEP, "llama", frozenset({digest("a")}))]
    page.begin_scheduling("llama")
    page.end_steps()  # nothing was chosen
    assert read_page(fd) == []
    with page.main.doing(ThreadPhase.SELF_CHECK, "llama"):
        page.begin_scheduling("llama")
        page.begin_step("llama", [])
        assert page.main.phase == ThreadPhase.SELF_CHECK


def test_more_requests_than_there_is_room_for_are_all(fd: int, page: ActivityPage) -> None:
    page.begin_step("llama", [str(number) for number in range(10_000)])
    assert read_page(fd) == [Activity(ThreadPhase.STEP, "llama", None)]
    page.main.set(ThreadPhase.STEP, "l" * 5_000, None)
    assert all(one.requests is None for one in read_page(fd))


def test_other_threads_have_slots_of_their_own(fd: int, page: ActivityPage) -> None:
    with page.beside(ThreadPhase.GRAMMAR, "llama", ["a"]), page.beside(ThreadPhase.COPY):
        page.begin_step("qwen", ["b"])
        assert not page.is_alone
        assert {one.phase for one in read_page(fd)} == {
            ThreadPhase.GRAMMAR,
            ThreadPhase.COPY,
            ThreadPhase.STEP,
        }
    assert page.is_alone
    for _ in range(3 * NUM_SLOTS):  # slots are given back, after exceptions too
        with pytest.raises(KeyError), page.beside(ThreadPhase.GRAMMAR, "llama", ["a"]):
            raise KeyError
    assert page.is_alone


def test_what_is_no_page_is_read_nevertheless(fd: int) -> None:
    os.pwrite(fd, b"\xff" * PAGE_BYTES, 0)
    assert read_page(fd) == []
    os.pwrite(fd, bytes([ThreadPhase.STEP]) + b"\xff" * (PAGE_BYTES - 1), 0)
    [one] = read_page(fd)
    assert one.requests is None


_CRASH = """
import os, signal, sys
from gpupoold.system.activity import WORKER, ThreadPhase
WORKER.attach(int(sys.argv[1]))
WORKER.begin_step("llama", ["poison", "other"])
os.kill(os.getpid(), signal.SIGSEGV)
"""


def test_the_page_outlives_the_process(fd: int) -> None:
    ended = subprocess.run([sys.executable, "-c", _CRASH, str(fd)], pass_fds=[fd], check=False)
    assert ended.returncode == -signal.SIGSEGV
    [one] = read_page(fd)
    assert one == Activity(
        ThreadPhase.STEP, "llama", frozenset({digest("poison"), digest("other")})
    )
