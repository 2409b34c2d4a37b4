"""Locks of folders and files, held by this process and released by the kernel at its end."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

from gpupoold.errors import Failed, Refused

LOCK_NAME = "gpupoold.lock"


class StateLock:
    """A held lock, returned by ``acquire``; the kernel releases the lock when the process ends."""

    def __init__(self, folder: Path, descriptor: int) -> None:
        self.folder = folder
        self._descriptor: int | None = descriptor

    @classmethod
    def acquire(cls, folder: Path) -> Self:
        """Create ``folder`` if missing and lock it for this process.

        Raises:
            Refused: another process has the lock; the message names its pid.
            Failed: the folder cannot be created or written.
        """
        path = folder / LOCK_NAME
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            # O_CLOEXEC, because a child with the descriptor would keep the lock.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            raise _unusable(folder, error) from error
        try:
            _lock(descriptor, folder)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(folder, descriptor)

    def release(self) -> None:
        """Release the lock; repeated calls have no effect."""
        if self._descriptor is None:
            return
        # The file stays: after an unlink, a second process could lock the old file, opened before,
        # while a third process creates and locks a new file.
        os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refused(
            f"the state folder {folder} is in use by {_holder(descriptor)}",
            "stop the running gpupoold first, or choose another state folder",
        ) from error
    except OSError as error:
        raise _unusable(folder, error) from error
    _write_pid(descriptor)


def _write_pid(descriptor: int) -> None:
    # Errors are ignored: only an error message uses the pid, and the daemon must start on a full
    # disk. Writing with a fixed length in place needs no new block.
    try:
        os.pwrite(descriptor, f"{os.getpid():<20}\n".encode(), 0)
    except OSError:
        return


def _holder(descriptor: int) -> str:
    text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return f"the process with pid {text}" if text.isdecimal() else "another process"


def _unusable(folder: Path, error: OSError) -> Failed:
    return Failed(
        f"the state folder {folder} cannot be used: {error.strerror or error}",
        "choose a folder that gpupoold's user can create and write, on a disk mounted read-write "
        "and with space left",
    )


@asynccontextmanager
async def turn(path: Path) -> AsyncIterator[None]:
    """Hold a lock file, which is created if necessary, after waiting for other processes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        await asyncio.to_thread(fcntl.flock, fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
