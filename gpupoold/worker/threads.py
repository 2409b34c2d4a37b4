"""The turn thread, the work of other threads that needs it, torch's threads, and the heap of all.

The turn thread owns the accounts of pages, residency and requests, and steps the engines. Another
thread gives it *jobs*, which run between two steps: calls, and generators that are advanced slice
by slice, so that streams go on between two slices.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar

import torch

from gpupoold.system.activity import WORKER, ThreadPhase

_P = ParamSpec("_P")
_T = TypeVar("_T")

_HELD_POLL_S = 0.1

_load_threads: int | None = None


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


def manage_torch_threads(num_threads: int) -> None:
    """Let loads use ``num_threads`` and steps one, instead of ``OMP_NUM_THREADS`` both.

    Loads use the cores, steps one thread: OpenMP's threads spin after each parallel operation and
    take the cores from the rest of the step, the daemon and the frontends. vLLM's own server does
    the same. torch keeps the number for each thread of the process. Dynamo's guards contain the
    number, so a load goes on with the number of steps before vLLM compiles.
    """
    global _load_threads
    _load_threads = num_threads
    os.environ["OMP_NUM_THREADS"] = "1"  # vLLM warns of more, and leaves the number alone


def use_step_threads() -> None:
    """Set the number of the calling thread, which makes steps."""
    if _load_threads is not None:
        torch.set_num_threads(1)


def use_load_threads() -> None:
    """Set the number of the calling thread, which loads a model."""
    if _load_threads is not None:
        torch.set_num_threads(_load_threads)


class Heap:
    """The heap of this process.

    A collection of vLLM's and torch's objects takes 0.3 s and more. Frozen objects are not
    collected: the heap is frozen before a load, so that collections during the load are short, and
    after the load. The objects of a closed engine, most of which are frozen, wait until the device
    is idle.
    """

    def __init__(self) -> None:
        self._has_garbage = False

    def freeze(self) -> None:
        """Exclude all present objects from collections until the next ``collect``."""
        gc.freeze()

    def engine_closed(self) -> None:
        """Record that frozen objects are garbage."""
        self._has_garbage = True

    def collect(self) -> None:
        """Collect all garbage, if an engine was closed; stops the process for a time."""
        if not self._has_garbage:
            return
        self._has_garbage = False
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        torch.cuda.empty_cache()  # no-op without a GPU


HEAP = Heap()
