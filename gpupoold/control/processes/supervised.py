"""Supervision of a process: start, watch, cause of the end, restart after each end."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import Child
from gpupoold.system.activity import Activity, ThreadPhase, digest
from gpupoold.system.process import OUT_OF_DEVICE_MEMORY_STATUS, OUT_OF_MEMORY_STATUS
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

M = TypeVar("M")

_logger = logging.getLogger(__name__)

FIRST_S = 1.0
MAX_S = 60.0
STABLE_AFTER_S = 60.0

# On a busy machine, the time between two checks is often up to this long.
_SLEPT_S = 2.0

P = TypeVar("P")

# Signals caused by the process's own code; all other signals come from outside.
_OWN_FAULTS = frozenset(
    {
        signal.SIGSEGV,
        signal.SIGBUS,
        signal.SIGABRT,
        signal.SIGFPE,
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGSYS,
    }
)

VMSTAT = Path("/proc/vmstat")
# A kill may be counted up to this long before the death of the process.
_MOMENT_S = 3.0


class Supervised(ABC, Generic[M]):
    """A process that runs from :meth:`start` to :meth:`stop`; each end is followed by a restart.

    A subclass gives the command line, handles the messages ``M`` and drops the state of an ended
    process. ``watch`` has the observations of the present run. ``num_restarts`` counts processes
    that ended and were or will be replaced. ``handles_last_messages`` is true if :meth:`stop`
    handles messages until the process ends.
    """

    handles_last_messages = False

    def __init__(
        self, name: str, settings: Settings, timing: Timing, max_backoff_s: float = MAX_S
    ) -> None:
        self.name = name
        self.num_restarts = 0
        self.watch: Watch | None = None
        self._settings = settings
        self._timing = timing
        self._backoff = Backoff(max_backoff_s)
        self._child: Child[M] | None = None
        self._ended_for = ""
        self._setting_up: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    @abstractmethod
    async def _launch(self) -> Child[M]:
        """Start a process, or raise OSError."""

    @abstractmethod
    def _note(self, message: M, watch: Watch, now_s: float) -> None:
        """Handle a message; call :meth:`_begin_set_up` when the process is ready for work."""

    @abstractmethod
    async def _set_up(self) -> None:
        """Set up a process that is ready for work; an error ends the process."""

    @abstractmethod
    async def _note_end(self, death: Death) -> bool:
        """Report an end; return whether the end is excused, see :meth:`Backoff.after`."""

    async def _pause(self) -> bool:
        """Wait while no process is wanted after an ordered end; return False for other ends."""
        return False

    async def _death(self, status: int | None, ended_for: str) -> Death:
        """Return the death for an exit status, see :func:`death_of`."""
        return death_of(status, ended_for)

    def _forget(self, reason: str) -> None:
        """Drop the state of a process that ended for ``reason``, and end the waits for answers.

        :meth:`stop` does not call this method: no other process follows.
        """
        if self._setting_up is not None:
            self._setting_up.cancel()
            self._setting_up = None

    @property
    def is_excused(self) -> bool:
        """True during work with a separate time limit; the watchdog then accepts silence."""
        return False

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self._child is None else self._child.pid

    @property
    def log_path(self) -> Path:
        """The file with the process's output."""
        return self._settings.paths.log_dir / f"{self.name.replace(' ', '-')}.log"

    def start(self) -> None:
        """Start the process, and restart the process after each end."""
        self._keep(keep_running(self.name, self._run_once, self._backoff, self._timing), self.name)

    async def stop(self) -> None:
        """Stop the process within the grace time."""
        await self._cancel_tasks()
        if self._child is not None:
            grace_s = self._settings.limits.stop_grace_s
            if self.handles_last_messages and self.watch is not None:
                self._keep(self._receive(self._child, self.watch), f"{self.name}-last")
            await self._child.stop(m.Shutdown(grace_s), grace_s)
            await self._cancel_tasks()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, unless no process runs."""
        if self._child is not None and not self._child.channel.closed:
            self._child.channel.send(message, fds)

    def take_fd(self) -> int:
        """Return the next descriptor of the latest message, owned by the caller."""
        assert self._child is not None
        return self._child.channel.take_fd()

    def reconfigure(self) -> None:
        self.send(reconfigure(self._settings))

    def end(self, reason: str) -> None:
        """Kill and replace the process; ``reason`` appears in the log and in events."""
        if self._child is not None and not self._ended_for:
            _logger.error("%s is killed: %s", self.name, reason)
            self._ended_for = reason
            self._child.kill()

    async def _run_once(self) -> bool:
        """Run one process to its end; return whether the end is excused."""
        child = self._child = await self._launch()
        self.watch = Watch(self._timing.clock())
        self.reconfigure()
        await self._receive(child, self.watch)
        death = await self._death(await child.ended(), self._ended_for)
        self._child, self.watch, self._ended_for = None, None, ""
        if await self._pause():
            return True
        self.num_restarts += 1
        self._forget(f"{self.name} ended ({death.reason})")
        _logger.error("%s ended (%s); see %s", self.name, death.reason, self.log_path)
        return await self._note_end(death)

    async def _receive(self, child: Child[M], watch: Watch) -> None:
        """Handle messages until the channel is closed or a message cannot be handled."""
        try:
            while True:
                message = await child.channel.receive()
                self._note(message, watch, self._timing.clock())
        except ChannelClosed:
            pass
        except Exception:
            _logger.exception("a message of %s could not be handled", self.name)
            self.end("sent an invalid message")

    def _begin_set_up(self) -> None:
        self._setting_up = self._keep(self._set_up_or_end(), f"{self.name}-up")

    async def _set_up_or_end(self) -> None:
        try:
            await self._set_up()
        except Exception as error:
            _logger.exception("the set-up of %s failed", self.name)
            if self._setting_up is asyncio.current_task():  # not of an earlier process
                self.end(f"set-up failed: {error}")

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run ``work`` in a task that :meth:`stop` cancels."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def reconfigure(settings: Settings) -> m.Reconfigure:
    """Return the settings that running workers and frontends can apply."""
    limits = settings.limits
    return m.Reconfigure(
        settings.log.level,
        settings.memory.self_check_interval,
        settings.server.max_body_bytes,
        min(limits.max_live_requests_per_model, limits.max_live_requests),
        limits.max_bytes_in_flight // settings.server.frontends,
        settings.server.wait_comments_s,
    )


@dataclass(frozen=True, slots=True)
class Timing:
    """The monotonic clock in seconds, and the wait for a number of seconds."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL_TIME = Timing()


class Backoff:
    """The backoff of one process. Pure.

    A process that ran for ``STABLE_AFTER_S`` restarts at once; repeated short runs double the wait
    up to ``max_s``.
    """

    def __init__(self, max_s: float = MAX_S) -> None:
        self._max_s = max_s
        self._next_s = 0.0

    def after(self, ran_s: float, *, is_excused: bool = False) -> float:
        """Return the seconds to wait after a run of ``ran_s``.

        After an excused end no wait is needed.
        """
        if is_excused:
            return 0.0
        if ran_s >= STABLE_AFTER_S:
            self._next_s = 0.0
        wait_s = self._next_s
        self._next_s = min(max(FIRST_S, 2 * wait_s), self._max_s)
        return wait_s


async def keep_running(
    name: str, run_once: Callable[[], Awaitable[bool]], backoff: Backoff, timing: Timing
) -> None:
    """Call ``run_once`` repeatedly, with the waits of ``backoff``; never returns.

    ``run_once`` returns after the process's end, with True if the end is excused, see
    :meth:`Backoff.after`. ``run_once`` raises OSError if the process could not be started.
    """
    while True:
        started_s = timing.clock()
        is_excused = False
        try:
            is_excused = await run_once()
        except OSError as error:
            _logger.error("%s could not be started: %s", name, error)
        except Exception:
            _logger.exception("the supervision of %s failed", name)
        wait_s = backoff.after(timing.clock() - started_s, is_excused=is_excused)
        _logger.info("%s restarts in %g s", name, wait_s)
        await timing.sleep(wait_s)


class Watch:
    """Observations of one run of a worker; instants of one monotonic clock.

    A worker reports its number of steps several times a second. A hung worker stops reporting. A
    livelocked worker has a turn and requests, but its step counter does not advance. Loads run
    beside the steps: a load without an end is a reason of its own.
    """

    def __init__(self, now_s: float) -> None:
        self._started_s = self._seen_s = self._moved_s = now_s
        self._is_up = False
        self._num_steps = -1
        self._load: tuple[str, float] | None = None  # the model, and the start of the load

    def came_up(self, now_s: float) -> None:
        """Record that the process is ready for work."""
        self._is_up = True
        self.excuse(now_s)

    def seen(self, now_s: float) -> None:
        self._seen_s = now_s

    def stepped(self, now_s: float, num_steps: int, *, has_work: bool) -> None:
        """Record the number of steps, which need not grow without work."""
        self._seen_s = now_s
        if num_steps != self._num_steps or not has_work:
            self._num_steps, self._moved_s = num_steps, now_s

    def loads(self, model: str, began_s: float) -> None:
        """Record the present load of a model; an empty ``model`` means no load."""
        self._load = (model, began_s) if model else None

    def excuse(self, now_s: float) -> None:
        """Excuse the silence of the process until now."""
        self._seen_s = self._moved_s = now_s

    def failure_reason(self, now_s: float, hang_timeout_s: float, start_timeout_s: float) -> str:
        """Return why the process must end, empty for a healthy process."""
        if not self._is_up:
            is_late = now_s - self._started_s > start_timeout_s
            return f"not ready within {start_timeout_s:g} s" if is_late else ""
        if now_s - self._seen_s > hang_timeout_s:
            return f"hung: no message for {hang_timeout_s:g} s"
        if now_s - self._moved_s > hang_timeout_s:
            return f"hung: no step in the present turn for {hang_timeout_s:g} s"
        # After the daemon has given up, the worker has time to cancel the load.
        if self._load is not None and now_s - self._load[1] > start_timeout_s + hang_timeout_s:
            return f"hung: the load of {self._load[0]} does not end"
        return ""


class Watchdog:
    """Ends hung processes, by the present limits of ``settings``."""

    def __init__(self, watched: Iterable[Supervised[Any]], settings: Settings) -> None:
        self._watched = tuple(watched)
        self._settings = settings
        self._checked_s: float | None = None

    def check(self, now_s: float) -> None:
        """End hung processes; to be called every second.

        If this call itself is late, the daemon was asleep, and the silence of processes proves
        nothing.
        """
        limits = self._settings.limits
        hang_timeout_s, start_timeout_s = limits.hang_timeout_s, limits.load_timeout_s
        slept_s = 0.0 if self._checked_s is None else now_s - self._checked_s
        was_asleep = slept_s > hang_timeout_s / 2 and slept_s > _SLEPT_S
        self._checked_s = now_s
        for process in self._watched:
            if process.watch is None:
                continue
            if was_asleep or process.is_excused:
                process.watch.excuse(now_s)
            reason = process.watch.failure_reason(now_s, hang_timeout_s, start_timeout_s)
            if reason:
                process.end(reason)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a worker; ``is_at_fault`` if the worker was not ended from outside.

    ``activities`` are the activities of the worker's threads. ``is_of_device`` means that the
    hardware failed, so that no request or model is a candidate for the cause.
    """

    reason: str
    is_at_fault: bool
    activities: tuple[Activity, ...] = ()
    is_of_device: bool = False

    @property
    def doing(self) -> str:
        """The worker's activity in words, empty if all threads were idle."""
        return " and ".join(dict.fromkeys(map(_in_words, self.activities)))


def _in_words(activity: Activity) -> str:
    what = f"{activity.phase.text} {activity.model}".rstrip()
    num_requests = len(activity.requests or ())
    if activity.phase is not ThreadPhase.STEP or not num_requests:
        return what
    return f"{what} with {num_requests} request{'s' * (num_requests != 1)}"


def death_of(
    status: int | None,
    ended_for: str = "",
    activities: Iterable[Activity] = (),
    *,
    saw_oom_kill: bool = False,
) -> Death:
    """Return the death for an exit status; a negative status is a signal, None is unknown.

    ``ended_for`` is the daemon's reason for killing the process. With ``saw_oom_kill`` the kernel
    killed some process for memory just before.
    """
    return Death(*_cause(status, ended_for, saw_oom_kill=saw_oom_kill), tuple(activities))


def _cause(status: int | None, ended_for: str, *, saw_oom_kill: bool) -> tuple[str, bool]:
    if ended_for:
        return ended_for, True
    if status is None:
        return "exit status unknown", False
    if status == OUT_OF_MEMORY_STATUS:
        return "out of memory", True
    if status == OUT_OF_DEVICE_MEMORY_STATUS:
        return "out of device memory", True
    if status == -signal.SIGKILL and saw_oom_kill:
        return "out of memory: killed by the kernel", True
    if status < 0:
        return f"signal {-status}", -status in _OWN_FAULTS
    return f"exit status {status}", status != 0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Possible causes of a crash: one of these requests or models.

    ``has_unknown`` means that the cause may be absent from the activity page.
    """

    requests: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    has_unknown: bool = False

    @property
    def only_request(self) -> str | None:
        """The request, if no other cause is possible."""
        if len(self.requests) != 1 or self.models or self.has_unknown:
            return None
        return next(iter(self.requests))

    @property
    def only_model(self) -> str | None:
        """The model, if no other cause is possible; copies are part of loads and switches."""
        if len(self.models) != 1 or self.requests:
            return None
        return next(iter(self.models))


NOBODY = Candidates()


def candidates_of(death: Death, model_of: Mapping[str, str]) -> Candidates:
    """Return the possible causes of a death; none if something else than work ended the worker.

    ``model_of`` has the worker's live requests with their models.
    """
    if not death.is_at_fault or death.is_of_device:
        return NOBODY
    activities = death.activities
    return Candidates(
        frozenset(key for each in activities for key in _requests_of(each, model_of)),
        frozenset(each.model for each in activities if each.phase.is_due_to_model),
        any(each.phase is ThreadPhase.COPY for each in activities),
    )


def _requests_of(activity: Activity, model_of: Mapping[str, str]) -> list[str]:
    if activity.requests is None:
        return [key for key, model in model_of.items() if model == activity.model]
    return [key for key in model_of if digest(key) in activity.requests]


class OomKills:
    """The kernel's count of out-of-memory kills, including cgroup limits, sampled over time.

    The count names no process: a process killed for another reason at the same moment is
    misattributed.
    """

    def __init__(self, now_s: float, path: Path = VMSTAT) -> None:
        self._path = path
        self._seen: deque[tuple[float, int]] = deque()
        self.check(now_s)

    def check(self, now_s: float) -> None:
        """Sample the count; to be called about every second."""
        while self._seen and now_s - self._seen[0][0] > _MOMENT_S and len(self._seen) > 1:
            self._seen.popleft()
        self._seen.append((now_s, self._count()))

    def is_new(self) -> bool:
        """Return whether a kill happened in the last seconds."""
        return self._count() > self._seen[0][1]

    def _count(self) -> int:
        """Return the count, 0 if unavailable."""
        try:
            lines = self._path.read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


@dataclass(frozen=True, slots=True)
class ProcessHandlers(Generic[P, M]):
    """Handlers for processes ``P`` that send messages ``M``.

    ``on_message`` gets the messages that do not concern the process itself. ``on_up`` sets a new
    process up for its work; if ``on_up`` raises, the process is killed. ``on_down`` is called after
    the end of each process, also if ``on_up`` has not returned.
    """

    on_message: Callable[[P, M], None]
    on_up: Callable[[P], Awaitable[None]]
    on_down: Callable[[P, Death], Awaitable[None]]
