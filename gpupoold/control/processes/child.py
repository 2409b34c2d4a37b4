"""A child process, executed or forked, with a message channel and a log file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from gpupoold.config.schema import Settings
from gpupoold.errors import error_from_code
from gpupoold.logs.files import LogPipe
from gpupoold.system.process import as_words
from gpupoold.wire import messages as m
from gpupoold.wire.channel import AsyncChannel, ChannelClosed, DescriptorsLost
from gpupoold.wire.messages import CallResult

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

_logger = logging.getLogger(__name__)

# Limits for the end of a child after the channel is closed, and after a kill.
_LEAVING_S = 5.0
_DYING_S = 10.0
# Limit for writing the last lines of an ended child, on a slow disk.
_LAST_LINES_S = 5.0

# The first answer comes after all imports. Killing a fork server ends all its children.
ANSWER_TIMEOUT_S = 180.0


class Process(Protocol):
    """A running or ended process."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Return the exit status after the end; a negative number is a signal."""

    def kill(self) -> None:
        """Kill the process if it runs; may raise ProcessLookupError after the end."""


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


async def execute(launch: Launch) -> Process:
    """Run ``python -m MODULE``, see :data:`Starter`."""
    paths = [path for path in sys.path if path]  # for source checkouts
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        launch.module,
        *launch.arguments,
        *as_words({**launch.fd_options, "--parent-pid": os.getpid()}),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=launch.log_fd,
        stderr=launch.log_fd,
        pass_fds=tuple(launch.fd_options.values()),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(launch.environment),
    )


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
        process, by default as a program of its own. Raises OSError: the process or the log file
        could not be created.
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
        with contextlib.suppress(ProcessLookupError):
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
        if log is not None:
            await asyncio.wait([asyncio.wrap_future(log.finish())], timeout=_LAST_LINES_S)


class Pending(Generic[K, V]):
    """Futures by key, at most one per key; unexpected answers are ignored."""

    def __init__(self) -> None:
        self._futures: dict[K, asyncio.Future[V]] = {}

    def __contains__(self, key: K) -> bool:
        return key in self._futures

    def expect(self, key: K) -> asyncio.Future[V]:
        """Return the future for an answer about to be requested."""
        future: asyncio.Future[V] = asyncio.get_running_loop().create_future()
        self._futures[key] = future
        return future

    async def answer(self, key: K, limit_s: float) -> V:
        """Return the answer to a request; to be called immediately after sending the request.

        Raises TimeoutError: no answer came within ``limit_s`` seconds.
        """
        future = self.expect(key)
        try:
            async with asyncio.timeout(limit_s):
                return await future
        finally:
            self.forget(key)

    @property
    def oldest(self) -> K | None:
        """The key with the longest wait, None if no answer is awaited."""
        return next(iter(self._futures), None)

    def forget(self, key: K) -> None:
        """Stop waiting for a key, including callers of :meth:`settled`."""
        future = self._futures.pop(key, None)
        if future is not None:
            future.cancel()

    async def settled(self, key: K) -> None:
        """Return when no caller waits for the answer."""
        future = self._futures.get(key)
        if future is not None:
            await asyncio.wait({future})

    def resolve(self, key: K, value: V) -> bool:
        """Pass an answer to the waiting caller; return False if no answer is awaited."""
        future = self._futures.get(key)
        if future is None or future.done():
            return False
        future.set_result(value)
        return True

    def reject(self, key: K, error: Exception) -> None:
        """Raise ``error`` in the waiting caller."""
        future = self._futures.get(key)
        if future is not None and not future.done():
            future.set_exception(error)

    def resolve_all(self, value: V) -> None:
        for key in self._futures:
            self.resolve(key, value)

    def reject_all(self, error: Exception) -> None:
        """Raise ``error`` in all waiting callers."""
        for key in self._futures:
            self.reject(key, error)


class Calls(Pending[int, V]):
    """Answers to numbered calls."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count(1)

    def next_id(self) -> int:
        """Return the number of a new call."""
        return next(self._numbers)

    def answered(self, result: CallResult, value: V) -> None:
        """Resolve the call with ``value``, or reject the call with the error in ``result``."""
        if result.error_code:
            error = error_from_code(result.error_code, result.error_message, result.error_hint)
            self.reject(result.call_id, error)
        else:
            self.resolve(result.call_id, value)


class ForkedProcess:
    """A grandchild, whose parent, the fork server, reports the end."""

    def __init__(self, pid: int, pidfd: int) -> None:
        """``pidfd`` belongs to this object from now on."""
        self.pid = pid
        self._pidfd = pidfd
        self._status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._status)

    def kill(self) -> None:
        if not self._status.done():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def ended(self, status: int) -> None:
        if not self._status.done():
            self._status.set_result(status)
            os.close(self._pidfd)


class ForkServer:
    """Starts Python modules by forking; the fork server starts on first use and after a crash.

    A fork server that needs longer than ``answer_timeout_s`` for a fork is killed.
    """

    def __init__(
        self, settings: Settings, environment: Mapping[str, str], preloaded: Sequence[str]
    ) -> None:
        """``environment`` is added to the daemon's before anything is imported; ``preloaded``
        are modules with a ``preload(log_level)``."""
        self._settings = settings
        self._environment = environment
        self._preloaded = preloaded
        self.answer_timeout_s = ANSWER_TIMEOUT_S
        self._starting = asyncio.Lock()
        self._server: Child[m.FromForkServer] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._asked: Calls[ForkedProcess] = Calls()
        self._running: dict[int, ForkedProcess] = {}

    async def fork(self, launch: Launch) -> ForkedProcess:
        """Run a module, see :data:`Starter`.

        Raises OSError: the fork server could not be started, could not fork, or has died.
        """
        async with self._starting:
            if self._server is None:
                await self._start()
        server = self._server
        if server is None:
            raise OSError("the fork server has died")
        call_id = self._asked.next_id()
        order = m.Fork(
            call_id,
            launch.module,
            list(launch.arguments),
            list(launch.fd_options),
            dict(launch.environment),
        )
        try:
            server.channel.send(order, (launch.log_fd, *launch.fd_options.values()))
            return await self._asked.answer(call_id, self.answer_timeout_s)
        except TimeoutError:
            server.kill()
            raise OSError(
                f"the fork server did not answer within {self.answer_timeout_s:g} s and is killed"
            ) from None

    async def stop(self) -> None:
        """Stop the fork server and its children."""
        if self._server is not None:
            self._server.kill()
        if self._reader is not None:
            await self._reader

    async def _start(self) -> None:
        arguments = ["--log-level", self._settings.log.level]
        for name in self._preloaded:
            arguments += ["--preload", name]
        self._server = await Child.start(
            "fork server",
            "gpupoold.system.fork_server",
            arguments,
            m.FromForkServer,
            self._settings.paths.log_dir / "fork-server.log",
            environment=self._environment,
        )
        self._reader = asyncio.create_task(self._read(self._server), name="fork-server")

    async def _read(self, server: Child[m.FromForkServer]) -> None:
        try:
            while True:
                self._note(server, await server.channel.receive())
        except ChannelClosed:
            server.kill()
        await server.ended()
        self._server = None
        self._asked.reject_all(OSError("the fork server has died"))
        for process in self._running.values():
            process.ended(-signal.SIGKILL)  # the kernel kills children with their parent
        self._running.clear()

    def _note(self, server: Child[m.FromForkServer], message: m.FromForkServer) -> None:
        match message:
            case m.ForkEnded():
                # A process whose pidfd was lost is absent.
                if (process := self._running.pop(message.pid, None)) is not None:
                    process.ended(message.status)
            case m.ForkFailed():
                self._asked.reject(message.call_id, _could_not_fork(message.reason))
            case m.Forked():
                self._note_forked(server, message)

    def _note_forked(self, server: Child[m.FromForkServer], message: m.Forked) -> None:
        try:
            process = ForkedProcess(message.pid, server.channel.take_fd())
        except DescriptorsLost as error:
            server.channel.send(m.KillForked(message.pid))
            self._asked.reject(message.call_id, _could_not_fork(str(error)))
            return
        self._running[message.pid] = process
        if not self._asked.resolve(message.call_id, process):
            process.kill()  # the caller no longer waits


def _could_not_fork(reason: str) -> OSError:
    return OSError(f"the fork server could not fork: {reason}")
