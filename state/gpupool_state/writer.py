"""The only writing connection to the database, and transactions."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import aiosqlite

from gpupoold.errors import Failed, Refused

_FULL = (
    "no space left for the state database {path}",
    "free some space on the disk and try again; the change was not made",
)
_LOCKED = (
    "the state database {path} is locked by another program",
    "end the program that has the file open (a sqlite3 shell, a backup job) and try again",
)
_READ_ONLY = (
    "the state database {path} cannot be written",
    "check that the file and its folder belong to gpupoold's user, and that the disk is not "
    "mounted read-only",
)
_CANNOT_OPEN = (
    "the state database {path} cannot be opened",
    "check that the folder exists and that gpupoold's user may write there",
)
_NOT_A_DATABASE = (
    "{path} is not a SQLite database",
    "move the file away to start with an empty registry, or replace the file by a backup",
)
_CORRUPT = (
    "the state database {path} is damaged",
    "stop gpupoold and replace the file by a backup, or recover the data: sqlite3 {path} .recover",
)
_IO_ERROR = (
    "reading or writing the state database {path} failed",
    "check the system log for disk errors",
)

# By primary result code, which is the low byte of an extended code.
_MEANINGS: dict[int, tuple[str, str]] = {
    sqlite3.SQLITE_FULL: _FULL,
    sqlite3.SQLITE_BUSY: _LOCKED,
    sqlite3.SQLITE_LOCKED: _LOCKED,
    sqlite3.SQLITE_PROTOCOL: _LOCKED,
    sqlite3.SQLITE_READONLY: _READ_ONLY,
    sqlite3.SQLITE_PERM: _READ_ONLY,
    sqlite3.SQLITE_CANTOPEN: _CANNOT_OPEN,
    sqlite3.SQLITE_NOTADB: _NOT_A_DATABASE,
    sqlite3.SQLITE_CORRUPT: _CORRUPT,
    sqlite3.SQLITE_IOERR: _IO_ERROR,
}


class Source(Protocol):
    """A source of rows: a transaction, the writer or the database."""

    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query."""
        ...


class Transaction:
    """An open write transaction; valid only inside its ``async with`` block."""

    def __init__(self, connection: aiosqlite.Connection) -> None:
        self._connection = connection
        self._open = True

    async def execute(self, sql: str, values: Sequence[Any] = ()) -> int:
        """Run one statement; return the number of changed rows."""
        self._check_open()
        async with self._connection.execute(sql, values) as cursor:
            return cursor.rowcount

    async def execute_many(self, sql: str, rows: Iterable[Sequence[Any]]) -> int:
        """Run a statement for each row of values; return the total number of changed rows."""
        self._check_open()
        async with self._connection.executemany(sql, rows) as cursor:
            return cursor.rowcount

    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query, with this transaction's changes."""
        self._check_open()
        return list(await self._connection.execute_fetchall(sql, values))

    async def fetch_one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, values)
        return rows[0] if rows else None

    def end(self) -> None:
        """Make later calls raise RuntimeError, because these would run outside the transaction."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("this write transaction has ended")


class Writer:
    """The owner of the write connection; runs one transaction at a time, in order of request."""

    def __init__(self, connection: aiosqlite.Connection, path: Path) -> None:
        self._connection = connection
        self._path = path
        self._turn = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None
        self._closed = False
        self._durable: bool | None = None  # not set yet

    @asynccontextmanager
    async def transaction(self, *, durable: bool = True) -> AsyncIterator[Transaction]:
        """Begin a write transaction, committed at the end of the block, rolled back on errors.

        A committed change survives a kill of the process and, if ``durable``, a power failure. A
        cancellation during the commit is delivered after the commit.

        Raises:
            Failed: the disk is full, or the database is locked, read-only, damaged or closed.
            RuntimeError: the same task has a transaction open.
        """
        if self._owner is not None and self._owner is asyncio.current_task():
            raise RuntimeError("a write transaction was opened inside another")
        async with self._turn:
            if self._closed:
                raise Failed(f"the state database {self._path} is closed")
            self._owner = asyncio.current_task()
            transaction = Transaction(self._connection)
            try:
                with explained(self._path):
                    await self._begin(durable)
                    yield transaction
                    await to_the_end(self._commit())
            except BaseException:
                # Without effect if the commit succeeded or SQLite has rolled back.
                with suppress(sqlite3.Error):
                    await to_the_end(self._connection.rollback())
                raise
            finally:
                transaction.end()
                self._owner = None

    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query outside of transactions; to be used only at the start."""
        with explained(self._path):
            return list(await self._connection.execute_fetchall(sql, values))

    async def copy_to(self, target: Path) -> None:
        """Write a consistent, compacted copy of the database; ``target`` must not exist.

        Raises:
            Failed: the disk is full or the folder cannot be written.
        """
        await self.fetch_all("VACUUM INTO ?", (str(target),))

    async def close(self) -> None:
        """Wait for the transaction under way, then close the connection."""
        async with self._turn:
            if not self._closed:
                self._closed = True
                await self._connection.close()

    async def _begin(self, durable: bool) -> None:
        if durable != self._durable:  # SQLite cannot change the level within a transaction
            level = "FULL" if durable else "NORMAL"
            await self._connection.execute_fetchall(f"PRAGMA synchronous = {level}")
            self._durable = durable
        # IMMEDIATE takes the write lock now, so that a lock of another program fails the
        # transaction before any work is done.
        async with self._connection.execute("BEGIN IMMEDIATE"):
            pass

    async def _commit(self) -> None:
        # Not connection.commit(), which raises no error if SQLite has rolled the transaction back,
        # as happens on some disk errors.
        async with self._connection.execute("COMMIT"):
            pass


async def to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Await ``work`` to the end, even if the caller is cancelled during the wait.

    Raises:
        asyncio.CancelledError: the caller was cancelled; raised after ``work`` has ended.
    """
    task = asyncio.ensure_future(work)
    cancellation: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise
            cancellation = error
        except Exception:
            break
    task.result()
    if cancellation is not None:
        raise cancellation


def explain(error: sqlite3.Error, path: Path) -> Failed | None:
    """Return the error for the operator, or None if ``error`` is a defect of the program."""
    code = getattr(error, "sqlite_errorcode", None)
    meaning = None if code is None else _MEANINGS.get(code & 0xFF)
    if meaning is None:
        return None
    return _failed(meaning, path, str(error))


def damaged(path: Path, detail: str) -> Failed:
    """Return the error for a database that SQLite's check found damaged; ``detail`` says how."""
    return _failed(_CORRUPT, path, detail)


def cannot_open(path: Path, detail: str) -> Failed:
    """Return the error for a file that cannot be opened, for the reason ``detail``."""
    return _failed(_CANNOT_OPEN, path, detail)


def emptied(path: Path, traces: Sequence[str]) -> Refused:
    """Return the error for a database without content beside ``traces`` of an earlier one."""
    backups = [name for name in traces if ".bak-" in name]
    backup = f"the backup {backups[-1]}" if backups else "a backup"
    return Refused(
        f"the state database {path} is empty, but its folder has {', '.join(traces)}: what an "
        "earlier database had is lost or was moved",
        f"replace {path.name} by {backup}, without {path.name}-wal and {path.name}-shm; or, to "
        f"start with an empty database, move {', '.join(traces)} to another folder",
    )


def _failed(meaning: tuple[str, str], path: Path, detail: str) -> Failed:
    message, hint = (text.format(path=path) for text in meaning)
    return Failed(f"{message}: {detail}", hint)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert SQLite errors caused by the disk or other programs to ``Failed``.

    Raises:
        Failed: the disk is full, or the file is locked, read-only, unreadable, damaged or not a
            database.
        sqlite3.Error: any other error: a defect of the program.
    """
    try:
        yield
    except sqlite3.Error as error:
        clear = explain(error, path)
        if clear is None:
            raise
        raise clear from error
