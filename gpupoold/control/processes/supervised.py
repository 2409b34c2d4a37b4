"""Supervision of a process: start, watch, restart after each end."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.crash_attribution import Death, death_of
from gpupoold.control.processes.restarts import MAX_S, Backoff, Timing, keep_running
from gpupoold.control.processes.watchdog import Watch
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

M = TypeVar("M")

_logger = logging.getLogger(__name__)


class Supervised(ABC, Generic[M]):
    """A process that runs from :meth:`start` to :meth:`stop`; each end is followed by a restart.

    A subclass gives the command line, handles the messages ``M`` and drops the state of an ended
    process. ``watch`` has the observations of the present run. ``num_restarts`` counts processes
    that ended and were or will be replaced.
    """

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
        """Start a process.

        Raises:
            OSError: the process could not be started.
        """

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

    def _death(self, status: int | None, ended_for: str) -> Death:
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            grace_s = self._settings.limits.stop_grace_s
            await self._child.stop(m.Shutdown(grace_s), grace_s)

    def send(self, message: m.Message, fds: tuple[int, ...] = ()) -> None:
        """Send a message, unless no process runs."""
        if self._child is not None and not self._child.channel.closed:
            self._child.channel.send(message, fds)

    def take_fd(self) -> int:
        """Return the next descriptor of the latest message, owned by the caller."""
        assert self._child is not None
        return self._child.channel.take_fd()

    def reconfigure(self) -> None:
        """Send the present configuration."""
        self.send(reconfigure(self._settings))

    def end(self, reason: str) -> None:
        """Kill and replace the process; ``reason`` appears in the log and in events."""
        if self._child is not None and not self._ended_for:
            _logger.error("%s is killed: %s", self.name, reason)
            self._ended_for = reason
            self._child.kill()

    async def _run_once(self) -> bool:
        """Run one process to its end; return whether the end is excused."""
        known = reconfigure(self._settings)
        child = self._child = await self._launch()
        self.watch = Watch(self._timing.clock())
        if reconfigure(self._settings) != known:
            self.reconfigure()  # the configuration has changed during the start
        await self._receive(child, self.watch)
        death = self._death(await child.ended(), self._ended_for)
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
