"""Children forked from a process that has imported vLLM (:mod:`gpupoold.system.fork_server`)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping, Sequence

from gpupoold.config.schema import Settings
from gpupoold.control.processes.child import Child, Launch
from gpupoold.control.processes.supervised import Calls
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed, DescriptorsLost

_logger = logging.getLogger(__name__)

# The first answer comes after all imports. Killing a fork server ends all its children.
ANSWER_TIMEOUT_S = 180.0


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

        Raises:
            OSError: the fork server could not be started, could not fork, or has died.
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
