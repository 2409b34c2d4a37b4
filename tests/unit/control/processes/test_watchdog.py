"""Workers that hang or spin, those that only take their time, and a daemon that slept itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from gpupoold.config.schema import Settings
from gpupoold.config.sections import LimitSettings
from gpupoold.control.processes.supervised import Watch, Watchdog

HANG_S = 60.0
START_S = 600.0


@dataclass
class Worker:
    """One that came up at second 0."""

    watch: Watch | None = field(default_factory=lambda: Watch(0.0))
    is_excused: bool = False
    note_end: Callable[[Worker, str], None] = field(default=lambda worker, reason: None)

    def __post_init__(self) -> None:
        assert self.watch is not None
        self.watch.came_up(0.0)

    def end(self, reason: str) -> None:
        self.note_end(self, reason)


class Post:
    """A watchdog that checks once a second, and when it ended whom."""

    def __init__(self, *workers: Worker) -> None:
        self.ended: list[tuple[float, Worker, str]] = []
        self.now_s = 0.0
        for worker in workers:
            worker.note_end = self._end
        limits = LimitSettings(hang_timeout=HANG_S, load_timeout=START_S)
        self._dog = Watchdog(cast(Any, workers), cast(Settings, SimpleNamespace(limits=limits)))

    def look_until(self, end_s: float) -> None:
        while self.now_s < end_s:
            self.now_s += 1.0
            self._dog.check(self.now_s)

    def sleep_until(self, end_s: float) -> None:
        self.now_s = end_s
        self._dog.check(end_s)

    def _end(self, worker: Worker, reason: str) -> None:
        self.ended.append((self.now_s, worker, reason))
        worker.watch = None


def test_who_says_nothing_is_hung() -> None:
    worker = Worker()
    post = Post(worker, Worker())
    assert worker.watch is not None
    worker.watch.stepped(10.0, 5, has_work=True)
    post.look_until(60.0)
    assert post.ended == []
    post.look_until(80.0)
    assert [(at_s, reason) for at_s, _, reason in post.ended] == [
        (61.0, "hung: no message for 60 s"),
        (71.0, "hung: no message for 60 s"),
    ]


def test_who_spins_is_hung() -> None:
    """It tells that it lives, has a turn and requests, and makes no step."""
    worker = Worker()
    post = Post(worker)
    for second in range(200):
        post.look_until(float(second))
        if worker.watch is not None:
            worker.watch.stepped(float(second), min(second, 30), has_work=True)
    assert post.ended == [(91.0, worker, "hung: no step in the present turn for 60 s")]


def test_who_has_nothing_to_do_need_not_step() -> None:
    worker = Worker()
    post, watch = Post(worker), worker.watch
    assert watch is not None
    for second in range(300):
        post.look_until(float(second))
        watch.stepped(float(second), 7, has_work=False)
    watch.stepped(300.0, 7, has_work=True)
    post.look_until(350.0)
    watch.seen(350.0)
    assert post.ended == []
    post.look_until(361.0)
    assert [reason for _, _, reason in post.ended] == ["hung: no step in the present turn for 60 s"]


def test_a_worker_that_loads_has_to_step_all_the_same() -> None:
    worker = Worker()
    post = Post(worker)
    for second in range(100):
        post.look_until(float(second))
        if worker.watch is not None:
            worker.watch.loads("new", 5.0)
            worker.watch.stepped(float(second), min(second, 30), has_work=True)
    assert post.ended == [(91.0, worker, "hung: no step in the present turn for 60 s")]


def test_a_load_that_does_not_end_is_hung() -> None:
    """Later than the daemon's own limit, so that the worker has time to cancel."""
    worker = Worker()
    post = Post(worker)
    for second in range(800):
        post.look_until(float(second))
        if worker.watch is not None:
            worker.watch.loads("endless" if second < 70 or second > 80 else "", second // 90 * 90.0)
            worker.watch.stepped(float(second), second, has_work=True)
    assert post.ended == []
    for second in range(800, 1600):
        post.look_until(float(second))
        if worker.watch is not None:
            worker.watch.loads("endless", 810.0)
            worker.watch.stepped(float(second), second, has_work=True)
    assert [(at, reason) for at, _, reason in post.ended] == [
        (1471.0, "hung: the load of endless does not end")
    ]


def test_a_benchmark_takes_its_time_and_then_the_clock_begins() -> None:
    worker = Worker(is_excused=True)
    post = Post(worker)
    post.look_until(500.0)
    worker.is_excused = False
    post.look_until(560.0)
    assert post.ended == []
    post.look_until(561.0)
    assert len(post.ended) == 1


def test_who_does_not_come_up_is_ended() -> None:
    worker = Worker()
    worker.watch = Watch(0.0)
    post = Post(worker)
    post.look_until(600.0)
    assert post.ended == []
    post.look_until(601.0)
    assert post.ended == [(601.0, worker, "not ready within 600 s")]


def test_a_daemon_that_slept_blames_nobody() -> None:
    worker = Worker()
    post = Post(worker)
    post.look_until(20.0)
    post.sleep_until(5000.0)
    post.look_until(5060.0)
    assert post.ended == []
    post.look_until(5061.0)
    assert len(post.ended) == 1
