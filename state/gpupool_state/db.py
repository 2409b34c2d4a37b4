"""The state database: one SQLite file in WAL mode, one writer, one reader.

Durability: a durable commit (``synchronous=FULL``) is on disk before the call returns, and survives
any end of the process and a power failure. A commit that is not durable (``synchronous=NORMAL``),
such as the history's, survives any end of the process, ``kill -9`` included; a power failure or a
system crash may lose the last transactions. In no case is the file damaged.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import aiosqlite

from gpupool_state.migrations import MIGRATIONS, SchemaMigration, migrate
from gpupool_state.writer import Transaction, Writer, cannot_open, damaged, emptied, explained
from gpupoold.errors import Failed, Refused

DEFAULT_BUSY_TIMEOUT_S = 5.0

LOCK_NAME = "gpupoold.lock"


class Database:
    """An open state database, returned by ``await Database.open(path)``."""

    def __init__(
        self, path: Path, writer: Writer, reader: aiosqlite.Connection, stack: AsyncExitStack
    ) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._stack = stack
        self._closed = False

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        migrations: Sequence[SchemaMigration] = MIGRATIONS,
        busy_timeout_s: float = DEFAULT_BUSY_TIMEOUT_S,
    ) -> Self:
        """Open or create the database at ``path`` and update the schema.

        The caller must hold the lock of the state folder (``gpupool_state.db``).
        ``busy_timeout_s`` is the longest wait for a lock of another program.

        Raises:
            Failed: the file is unreadable, unwritable, damaged, locked or not a database, or the
                disk is full.
            Refused: the schema is newer than this program, or not gpupool's; or the database is
                empty in a folder with traces of an earlier one.
        """
        async with AsyncExitStack() as stack:
            with explained(path):
                _make_file(path)
                traces = traces_of(path)  # before SQLite removes a write-ahead log
                if traces and not path.stat().st_size:
                    raise emptied(path, traces)
                connection = await _connect(path, busy_timeout_s)
                writer = Writer(connection, path)
                stack.push_async_callback(writer.close)
                await _prepare(connection, path)
                await migrate(writer, path, migrations, traces)
                reader = await _connect(path, busy_timeout_s)
                stack.push_async_callback(reader.close)
                await reader.execute_fetchall("PRAGMA query_only = ON")
            return cls(path, writer, reader, stack.pop_all())

    def write(self, *, durable: bool = True) -> AbstractAsyncContextManager[Transaction]:
        """Begin a write transaction, after any present transaction; see ``Writer.transaction``."""
        return self._writer.transaction(durable=durable)

    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query, with the changes of all transactions committed before.

        Raises:
            Failed: the database is damaged, locked or closed.
        """
        if self._closed:
            raise Failed(f"the state database {self.path} is closed")
        with explained(self.path):
            return list(await self._reader.execute_fetchall(sql, values))

    async def fetch_one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """Return the first row of a query, or None. Raises as ``fetch_all``."""
        rows = await self.fetch_all(sql, values)
        return rows[0] if rows else None

    async def close(self) -> None:
        """Wait for the present transaction and close; repeated calls have no effect."""
        self._closed = True
        await self._stack.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


def _make_file(path: Path) -> None:
    # The file is created here for the file mode: SQLite would create a file readable by all users.
    # An existing file is not opened: closing the descriptor would drop the POSIX locks of every
    # other connection of this process to the file.
    try:
        if not path.exists():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        elif not path.is_file():
            raise IsADirectoryError(errno.EISDIR, "not a file")
        elif not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, "no permission to read and write the file")
    except OSError as error:
        raise cannot_open(path, error.strerror or str(error)) from error


def traces_of(path: Path) -> list[str]:
    """Return the names of files and folders beside a database that an earlier database left."""
    left = [path.with_name(f"{path.name}-wal"), *sorted(path.parent.glob(f"{path.name}.bak-*"))]
    folders = [path.parent / name for name in ("snapshots", "batches", "models", "files")]
    return [file.name for file in left if file.is_file() and file.stat().st_size] + [
        folder.name for folder in folders if folder.is_dir() and any(folder.iterdir())
    ]


async def _connect(path: Path, busy_timeout_s: float) -> aiosqlite.Connection:
    # isolation_level None: sqlite3 begins no transactions implicitly.
    connection = await aiosqlite.connect(path, isolation_level=None, timeout=busy_timeout_s)
    connection.row_factory = sqlite3.Row
    return connection


async def _prepare(connection: aiosqlite.Connection, path: Path) -> None:
    (mode,) = await connection.execute_fetchall("PRAGMA journal_mode = WAL")
    if mode[0] != "wal":
        raise Failed(
            f"the file system of {path} does not support SQLite's write-ahead log",
            "put the state folder on a local disk, not on a network share",
        )
    await connection.execute_fetchall("PRAGMA foreign_keys = ON")
    # Checked here, so that a damaged file fails the start with a reason and not a later request.
    (verdict, *_) = await connection.execute_fetchall("PRAGMA quick_check(1)")
    if verdict[0] != "ok":
        raise damaged(path, verdict[0])


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
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
