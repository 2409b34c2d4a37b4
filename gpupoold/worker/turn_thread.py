"""The turn thread, and the work of other threads that needs it.

The turn thread owns the accounts of pages, residency and requests, and steps the engines. Another
thread gives it *jobs*, which run between two steps: calls, and generators that are advanced slice
by slice, so that streams go on between two slices.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

from gpupoold.system.activity import WORKER, ThreadPhase

_P = ParamSpec("_P")
_T = TypeVar("_T")

_HELD_POLL_S = 0.1


@dataclass(eq=False)
class TurnThread:
    """Runs jobs of other threads on the thread that has created the object.

    ``slice_limit_s`` returns the longest time in seconds that a slice may take now.
    ``keep_alive`` is called on the turn thread several times a second while another thread holds
    the turn thread.
    """

    slice_limit_s: Callable[[], float] = lambda: math.inf
    keep_alive: Callable[[], None] = lambda: None
    _own: int = field(default_factory=threading.get_ident, init=False)
    _holder: int = field(default=0, init=False)
    _jobs: deque[_TurnJob] = field(default_factory=deque, init=False)
    _fatal: BaseException | None = field(default=None, init=False)

    @functools.cached_property
    def wake_fd(self) -> int:
        """A descriptor that becomes readable with a new job."""
        return os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def has_jobs(self) -> bool:
        return bool(self._jobs) or self._fatal is not None

    @property
    def is_held(self) -> bool:
        """True while another thread holds the turn thread."""
        return self._holder != 0

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` on the turn thread, which ends the process."""
        self._fatal = error
        os.eventfd_write(self.wake_fd, 1)

    def call(self, job: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Run ``job`` between two steps; return its result or raise its error."""
        if self._is_here:
            return job(*args, **kwargs)
        return self._post(_TurnJob(_as_slices(lambda: job(*args, **kwargs)))).result()

    def run_slices(self, slices: Generator[None, None, _T], phase: ThreadPhase, model: str) -> _T:
        """Run all slices between steps; return the generator's result or raise its error.

        ``phase`` and ``model`` describe the slices on the activity page.
        """
        job: _TurnJob = _TurnJob(slices, phase, model)
        if self._is_here:
            while not job.advance():
                pass
        else:
            self._post(job)
        return job.result()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keep the turn thread between two steps while the context's code runs here.

        For code that must not run beside a step, but in the thread where it began.
        """
        if self._is_here:
            yield
            return
        self._hold()
        try:
            yield
        finally:
            self._let_go()

    def give_way(self) -> None:
        """Let steps and other jobs run, if this thread holds the turn thread."""
        if self._holder == threading.get_ident() != self._own:
            self._let_go()
            self._hold()

    def _hold(self) -> None:
        begun, self._ended = threading.Event(), threading.Event()

        def wait() -> None:
            self._holder = holder
            begun.set()
            while not self._ended.wait(_HELD_POLL_S):
                self.keep_alive()
            self._holder = 0

        holder = threading.get_ident()
        self._held = self._post(_TurnJob(_as_slices(wait)))
        begun.wait()

    def _let_go(self) -> None:
        self._ended.set()
        self._held.result()

    def run(self, share_s: float) -> None:
        """Run jobs, or slices of jobs in turn, until none is left or ``share_s`` have passed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)
        if self._fatal is not None:
            raise self._fatal
        end_s = time.monotonic() + share_s
        while self._jobs:
            job = self._jobs.popleft()
            if not job.advance():
                self._jobs.append(job)
            if time.monotonic() >= end_s:
                break

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() in (self._own, self._holder)

    def _post(self, job: _TurnJob) -> _TurnJob:
        self._jobs.append(job)
        os.eventfd_write(self.wake_fd, 1)
        return job


@dataclass(eq=False, slots=True)
class _TurnJob:
    """Slices with their result."""

    slices: Generator[None, None, Any]
    phase: ThreadPhase = ThreadPhase.IDLE
    model: str = ""
    _result: Future[Any] = field(default_factory=Future, init=False)

    def result(self) -> Any:
        """Wait for the result."""
        return self._result.result()

    def advance(self) -> bool:
        """Run the next slice; return whether it was the last."""
        before = WORKER.main.phase
        try:
            if self.phase is not ThreadPhase.IDLE:
                WORKER.main.set(self.phase, self.model)
            next(self.slices)
        except StopIteration as end:
            self._result.set_result(end.value)
            return True
        except BaseException as error:
            self._result.set_exception(error)
            return True
        finally:
            if self.phase is not ThreadPhase.IDLE and before == ThreadPhase.IDLE:
                WORKER.main.clear()
        return False


def finish(slices: Generator[None, None, _T]) -> _T:
    """Run all slices at once; return the generator's result."""
    while True:
        try:
            next(slices)
        except StopIteration as end:
            result: _T = end.value
            return result


def _as_slices(job: Callable[[], _T]) -> Generator[None, None, _T]:
    """Return ``job`` as its only slice."""
    return job()
    yield
