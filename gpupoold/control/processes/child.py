"""A supervised child process with a message channel and a log file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gpupoold.logs.files import LogPipe
from gpupoold.system.process import as_words
from gpupoold.wire.channel import AsyncChannel

T = TypeVar("T")

_logger = logging.getLogger(__name__)

# Limits for the end of a child after the channel is closed, and after a kill.
_LEAVING_S = 5.0
_DYING_S = 10.0
# Limit for writing the last lines of an ended child, on a slow disk.
_LAST_LINES_S = 5.0


class Process(Protocol):
    """A running or ended process."""

    @property
    def pid(self) -> int:
        """Process id."""

    async def wait(self) -> int:
        """Return the exit status after the end; a negative number is a signal."""

    def kill(self) -> None:
        """Kill the process if it runs."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A Python module to run, with arguments.

    The options are ``arguments``, ``fd_options`` with descriptors as values, and ``--parent-pid``.
    stdout and stderr go to ``log_fd``. ``environment`` is added to the daemon's. The caller keeps
    the descriptors and may close them after the start.
    """

    module: str
    arguments: Sequence[str]
    log_fd: int
    fd_options: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


Starter = Callable[[Launch], Awaitable[Process]]
"""Starts a module; raises OSError on failure."""


class Executed:
    """A child process started by the daemon."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)


async def execute(launch: Launch) -> Executed:
    """Run ``python -m MODULE``, see :data:`Starter`."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        launch.module,
        *launch.arguments,
        *as_words({**launch.fd_options, "--parent-pid": os.getpid()}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=launch.log_fd,
        stderr=launch.log_fd,
        pass_fds=tuple(launch.fd_options.values()),
        env=_environment() | dict(launch.environment),
    )
    return Executed(process)


class Child(Generic[T]):
    """One run of ``python -m MODULE``; a restart makes a new object.

    The channel is a socketpair whose other end the child inherits as ``--wire-fd``. stdout and
    stderr go to ``log_path`` through a pipe.
    """

    def __init__(self, name: str, process: Process, channel: AsyncChannel[T], log: LogPipe) -> None:
        self.name = name
        self.channel = channel
        self._process = process
        self._log: LogPipe | None = log

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str],
        receives: Any,
        log_path: Path,
        *,
        fd_options: Mapping[str, int] | None = None,
        environment: Mapping[str, str] | None = None,
        starter: Starter = execute,
    ) -> Child[T]:
        """Start the module; the child reports readiness by a message.

        ``fd_options`` are further options with descriptors as values; ``starter`` starts the
        process, by default as a program of its own.

        Raises:
            OSError: the process or the log file could not be created.
        """
        ours, theirs = socket.socketpair()
        channel: AsyncChannel[T] | None = None
        try:
            channel = AsyncChannel(ours, receives)
            log = LogPipe(log_path)
            try:
                passed = {"--wire-fd": theirs.fileno(), **(fd_options or {})}
                launch = Launch(module, arguments, log.write_fd, passed, environment or {})
                process = await starter(launch)
            except BaseException:
                log.finish()
                raise
            finally:
                log.close_writing()
        except BaseException:
            if channel is not None:
                channel.close()
            ours.close()
            raise
        finally:
            theirs.close()
        _logger.info("%s started as process %d", name, process.pid)
        return cls(name, process, channel, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        self._process.kill()

    async def ended(self) -> int | None:
        """Return the exit status of a child that has closed the channel or must end.

        A child that does not end is killed. None means an unknown status: the fork server did
        not answer in time.
        """
        self.channel.close()
        for wait_s in (_LEAVING_S, _DYING_S):
            with contextlib.suppress(TimeoutError):
                status = await asyncio.wait_for(self._process.wait(), wait_s)
                await self._finish_log()
                return status
            self.kill()
        _logger.error("%s (process %d) has been killed and does not end", self.name, self.pid)
        return None

    async def stop(self, message: Any, grace_s: float) -> None:
        """Send ``message`` as a request to stop; kill the child after ``grace_s`` seconds."""
        if not self.channel.closed:
            self.channel.send(message)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
            await self._finish_log()
        except TimeoutError:
            _logger.warning("%s did not stop within %g s and is killed", self.name, grace_s)
            self.kill()
            await self.ended()
        self.channel.close()
        _logger.info("%s stopped", self.name)

    async def _finish_log(self) -> None:
        """Wait until the child's output is in the log."""
        log, self._log = self._log, None
        if log is None:
            return
        await asyncio.wait([asyncio.wrap_future(log.finish())], timeout=_LAST_LINES_S)


def _environment() -> dict[str, str]:
    """Return the daemon's environment with its import path, for source checkouts."""
    paths = [path for path in sys.path if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
