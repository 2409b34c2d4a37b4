"""The state database: one SQLite file in WAL mode, one writer, one reader.

Durability: a durable commit (``synchronous=FULL``) is on disk before the call returns, and survives
any end of the process and a power failure. A commit that is not durable (``synchronous=NORMAL``),
such as the history's, survives any end of the process, ``kill -9`` included; a power failure or a
system crash may lose the last transactions. In no case is the file damaged.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import aiosqlite

from gpupool_state.schema import BATCHES_SCHEMA, STATE_SCHEMA
from gpupoold import __version__
from gpupoold.errors import Failed, Refused
from gpupoold.files import replace_durably

Value = str | int | float | None

DEFAULT_BUSY_TIMEOUT_S = 5.0

_BOOKKEEPING = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL,
    gpupool_version TEXT NOT NULL
)
"""

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


@dataclass(frozen=True, slots=True)
class SchemaMigration:
    """A step of the schema; a released step is never changed, only followed by further steps."""

    number: int
    name: str
    statements: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AppliedMigration:
    """A step applied to a database at ``applied_at`` (wall-clock seconds) by a version."""

    number: int
    name: str
    applied_at: float
    gpupool_version: str


MIGRATIONS = (SchemaMigration(1, "initial", STATE_SCHEMA),)
BATCH_MIGRATIONS = (SchemaMigration(1, "initial", BATCHES_SCHEMA),)


async def applied(source: Source) -> tuple[AppliedMigration, ...]:
    """Return the steps applied to ``source``, in order."""
    if "schema_migrations" not in await _tables(source):
        return ()
    rows = await source.fetch_all(
        "SELECT number, name, applied_at, gpupool_version FROM schema_migrations ORDER BY number"
    )
    return tuple(AppliedMigration(*row) for row in rows)


async def pending(
    source: Source, migrations: Sequence[SchemaMigration] = MIGRATIONS
) -> tuple[SchemaMigration, ...]:
    """Return the steps not yet applied to ``source``, in order."""
    done = {step.number for step in await applied(source)}
    return tuple(step for step in migrations if step.number not in done)


async def migrate(
    db: Database, migrations: Sequence[SchemaMigration], traces: Sequence[str]
) -> None:
    """Update the schema of a database.

    A step and the row that records the step are one transaction, so a failed step leaves the
    database unchanged and is repeated by the next call. An older database is first copied to
    ``<path>.bak-<number>``, with the number of the last applied step.

    ``traces`` are the names of files beside the database that an earlier database left.

    Raises:
        Refused: the schema is newer than this program, or not gpupool's; or the database has no
            schema in spite of ``traces``.
        Failed: a step or the backup failed.
    """
    done = await applied(db)
    if traces and not done and not await _tables(db) - {"schema_migrations"}:
        raise emptied(db.path, traces)
    await _check_known(db, db.path, done, migrations)
    todo = await pending(db, migrations)
    if done and todo:
        await _back_up(db, done[-1].number)
    for step in todo:
        await _apply(db, step)


async def _tables(source: Source) -> set[str]:
    rows = await source.fetch_all("SELECT name FROM sqlite_master WHERE type = 'table'")
    return {row["name"] for row in rows}


async def _check_known(
    source: Source,
    path: Path,
    done: Sequence[AppliedMigration],
    migrations: Sequence[SchemaMigration],
) -> None:
    if not done and await _tables(source) - {"schema_migrations"}:
        raise Refused(
            f"{path} is a SQLite database, but not a database of gpupool",
            "move the file away or choose another state folder",
        )
    [(user_version,)] = await source.fetch_all("PRAGMA user_version")
    if user_version:
        raise Refused(
            f"the state database {path} has the user_version {user_version}, which this gpupool "
            f"{__version__} does not write",
            "install the gpupool that wrote the database, or choose another state folder",
        )
    newest_known = max((step.number for step in migrations), default=0)
    if done and done[-1].number > newest_known:
        raise _newer_schema(path, done[-1], newest_known)
    names = {step.number: step.name for step in migrations}
    for step in done:
        if names.get(step.number) != step.name:
            raise Refused(
                f"the state database {path} has schema step {step.number} {step.name!r}, "
                f"this gpupoold has {names.get(step.number)!r} as step {step.number}",
                "a different build of gpupool wrote the database: use that build, or another "
                "state folder",
            )


def _newer_schema(path: Path, newest: AppliedMigration, newest_known: int) -> Refused:
    program = f"gpupool {newest.gpupool_version}"
    return Refused(
        f"the state database {path} has schema version {newest.number}, written by {program}; "
        f"this is gpupool {__version__}, which knows schema versions up to "
        f"{newest_known}",
        f"install {program} again; or, to lose all changes since the upgrade, remove "
        f"{path.name}-wal and {path.name}-shm, and replace {path.name} by {path.name}.bak-"
        f"{newest_known}, if present (docs/operations.md)",
    )


async def _back_up(db: Database, number: int) -> None:
    target = db.path.with_name(f"{db.path.name}.bak-{number}")
    unfinished = target.with_name(f"{target.name}.part")
    try:
        unfinished.unlink(missing_ok=True)
        await db.copy_to(unfinished)
        replace_durably(unfinished, target)
    except (OSError, Failed) as error:
        raise Failed(
            f"the backup {target} before changing the schema could not be written: {error}",
            "free some space in the folder and start again; the database was not changed",
        ) from error


async def _apply(db: Database, step: SchemaMigration) -> None:
    try:
        async with db.write() as tx:
            await tx.execute(_BOOKKEEPING)
            for statement in step.statements:
                await tx.execute(statement)
            note = AppliedMigration(step.number, step.name, time.time(), __version__)
            await tx.insert("schema_migrations", asdict(note))
    except (sqlite3.Error, Failed) as error:
        detail = explain(error, db.path) or error if isinstance(error, sqlite3.Error) else error
        raise Failed(
            f"schema step {step.number} ({step.name}) of {db.path} failed: {detail}",
            "the database was not changed by the step; repair the cause and start again",
        ) from error


class Source(ABC):
    """A source of rows: a transaction or the database."""

    @abstractmethod
    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query."""

    async def fetch_one(self, sql: str, values: Sequence[Any] = ()) -> sqlite3.Row | None:
        """Return the first row of a query, or None."""
        rows = await self.fetch_all(sql, values)
        return rows[0] if rows else None


class Database(Source):
    """An open state database, returned by ``await Database.open(path)``.

    Runs one write transaction at a time, in order of request.
    """

    def __init__(self, path: Path, connection: aiosqlite.Connection) -> None:
        self.path = path
        self._connection = connection
        self._reader = connection  # until the schema is this program's
        self._turn = asyncio.Lock()
        self._owner: asyncio.Task[Any] | None = None
        self._closed = False
        self._durable: bool | None = None  # not set yet

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        migrations: Sequence[SchemaMigration] = MIGRATIONS,
        busy_timeout_s: float = DEFAULT_BUSY_TIMEOUT_S,
    ) -> Self:
        """Open or create the database at ``path`` and update the schema.

        The caller must hold the lock of the state folder, :class:`gpupool_state.lock.StateLock`.
        ``busy_timeout_s`` is the longest wait for a lock of another program.

        Raises:
            Failed: the file is unreadable, unwritable, damaged, locked or not a database, or the
                disk is full.
            Refused: the schema is newer than this program, or not gpupool's; or the database is
                empty in a folder with traces of an earlier one.
        """
        with explained(path):
            _make_file(path)
            traces = traces_of(path)  # before SQLite removes a write-ahead log
            if traces and not path.stat().st_size:
                raise emptied(path, traces)
            db = cls(path, await _connect(path, busy_timeout_s))
            try:
                await _prepare(db._connection, path)
                await migrate(db, migrations, traces)
                db._reader = await _connect(path, busy_timeout_s)
                await db._reader.execute_fetchall("PRAGMA query_only = ON")
            except BaseException:
                await db.close()
                raise
        return db

    @asynccontextmanager
    async def write(self, *, durable: bool = True) -> AsyncIterator[Transaction]:
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
                raise Failed(f"the state database {self.path} is closed")
            self._owner = asyncio.current_task()
            transaction = Transaction(self._connection)
            try:
                with explained(self.path):
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
        """Return all rows of a query, with the changes of all transactions committed before.

        Raises Failed: the database is damaged, locked or closed.
        """
        if self._closed:
            raise Failed(f"the state database {self.path} is closed")
        with explained(self.path):
            return list(await self._reader.execute_fetchall(sql, values))

    async def copy_to(self, target: Path) -> None:
        """Write a consistent, compacted copy of the database; ``target`` must not exist.

        Raises Failed: the disk is full or the folder cannot be written.
        """
        await self.fetch_all("VACUUM INTO ?", (str(target),))

    async def close(self) -> None:
        """Wait for the present transaction and close; repeated calls have no effect."""
        async with self._turn:
            if not self._closed:
                self._closed = True
                if self._reader is not self._connection:
                    await self._reader.close()
                await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

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


class Transaction(Source):
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

    async def insert(self, table: str, row: Mapping[str, Any]) -> None:
        """Insert a row of values by column."""
        marks = ", ".join("?" * len(row))
        await self.execute(
            f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values())
        )

    async def update(self, table: str, where: Mapping[str, Any], **changes: Any) -> int:
        """Change columns of the rows with the values ``where``; return the number of rows."""
        sets = ", ".join(f"{column} = ?" for column in changes)
        condition = " AND ".join(f"{column} = ?" for column in where)
        return await self.execute(
            f"UPDATE {table} SET {sets} WHERE {condition}", (*changes.values(), *where.values())
        )

    async def fetch_all(self, sql: str, values: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return all rows of a query, with this transaction's changes."""
        self._check_open()
        return list(await self._connection.execute_fetchall(sql, values))

    def end(self) -> None:
        """Make later calls raise RuntimeError, because these would run outside the transaction."""
        self._open = False

    def _check_open(self) -> None:
        if not self._open:
            raise RuntimeError("this write transaction has ended")


def storable(text: str) -> str:
    """Return a text without lone surrogates, bytes that were not UTF-8 and that SQLite refuses.

    A surrogate becomes a question mark, which no name can contain.
    """
    return text.encode("utf-8", "replace").decode()


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
