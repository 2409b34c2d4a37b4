"""A supervised child process with a message channel and a log file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from gpupoold.wire.channel import AsyncChannel

T = TypeVar("T")

_logger = logging.getLogger(__name__)


class Child(Generic[T]):
    """One run of ``python -m MODULE``; a restart makes a new object.

    The channel is a socketpair whose other end the child inherits as
    ``--wire-fd``. stdout and stderr go to ``log_path``.
    """

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, channel: AsyncChannel[T]
    ) -> None:
        self.name = name
        self.channel = channel
        self._process = process

    @classmethod
    async def start(
        cls,
        name: str,
        module: str,
        arguments: Sequence[str],
        receives: Any,
        log_path: Path,
        inherit_fds: tuple[int, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Child[T]:
        """Start the module; returns at once, the child says by message when it is ready.

        Raises:
            OSError: no process or no log file could be made.
        """
        ours, theirs = socket.socketpair()
        try:
            with log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    "--wire-fd",
                    str(theirs.fileno()),
                    *arguments,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(), *inherit_fds),
                    env=_environment() | dict(environment or {}),
                )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        _logger.info("%s started as process %d", name, process.pid)
        return cls(name, process, AsyncChannel(ours, receives))

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def wait(self) -> int:
        """Its exit status, once it has ended (negative: the signal that ended it)."""
        return await self._process.wait()

    def kill(self) -> None:
        """End it now."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def stop(self, message: Any, grace_s: float) -> None:
        """Ask it to leave with ``message``; after ``grace_s`` it is killed."""
        if not self.channel.closed:
            self.channel.send(message)
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            _logger.warning("%s did not stop within %g s and is killed", self.name, grace_s)
            self.kill()
            await self._process.wait()
        self.channel.close()
        _logger.info("%s stopped", self.name)


def _environment() -> dict[str, str]:
    """The daemon's environment, with its import path so that a source checkout works too."""
    paths = [path for path in sys.path if path]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONHASHSEED": "0"}
