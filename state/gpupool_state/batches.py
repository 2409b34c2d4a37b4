"""Files and batches of clients: a database of its own, used by all frontends.

``owner`` is the public id of an API key, empty without a key; a query with an owner sees only the
owner's rows. Times are wall-clock seconds. The results of a batch are rows until the batch has
ended, so that a result is either stored once or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from gpupool_state.db import Database
from gpupool_state.migrations import SchemaMigration
from gpupool_state.writer import Transaction

BATCHES_NAME = "batches.db"
BatchStatus = Literal[
    "validating",
    "in_progress",
    "finalizing",
    "cancelling",
    "completed",
    "failed",
    "expired",
    "cancelled",
]
_UNDER_WAY = ("validating", "in_progress", "finalizing", "cancelling")

_CREATE = (
    """
    CREATE TABLE files (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        purpose TEXT NOT NULL,
        filename TEXT NOT NULL,
        num_bytes INTEGER NOT NULL,
        created_at INTEGER NOT NULL
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE batches (
        id TEXT PRIMARY KEY,
        owner TEXT NOT NULL,
        endpoint TEXT NOT NULL,
        input_file_id TEXT NOT NULL,
        completion_window TEXT NOT NULL,
        metadata TEXT NOT NULL,
        status TEXT NOT NULL,
        errors TEXT NOT NULL DEFAULT '[]',
        output_file_id TEXT,
        error_file_id TEXT,
        num_requests INTEGER NOT NULL DEFAULT 0,
        num_completed INTEGER NOT NULL DEFAULT 0,
        num_failed INTEGER NOT NULL DEFAULT 0,
        created_at INTEGER NOT NULL,
        expires_at INTEGER NOT NULL,
        in_progress_at INTEGER,
        finalizing_at INTEGER,
        cancelling_at INTEGER,
        ended_at INTEGER
    ) WITHOUT ROWID
    """,
    """
    CREATE TABLE results (
        batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
        line INTEGER NOT NULL,
        has_failed INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (batch_id, line)
    ) WITHOUT ROWID
    """,
)
_MIGRATIONS = (SchemaMigration(1, "batches", _CREATE),)


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file; its content is in the folder of files under its id."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int


@dataclass(frozen=True, slots=True)
class BatchRow:
    """A batch. ``completion_window`` is as the client wrote it.

    ``errors`` has the problems of an invalid input file, as JSON objects of the API.
    """

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    metadata: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_requests: int = 0
    num_completed: int = 0
    num_failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    ended_at: int | None = None


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The result of the request in line ``line`` (from 0) of the input file, as a line of JSON."""

    line: int
    has_failed: bool
    body: bytes


_FILE_COLUMNS = tuple(one.name for one in fields(FileRow))
_BATCH_COLUMNS = tuple(one.name for one in fields(BatchRow))


class BatchStore:
    """Files and batches in the database; every method raises Failed if the disk fails."""

    def __init__(self, db: Database) -> None:
        self._db = db

    @classmethod
    async def open(cls, folder: Path) -> Self:
        """Open or create the database in ``folder``.

        Raises:
            Failed, Refused: see :meth:`Database.open`.
        """
        return cls(await Database.open(folder / BATCHES_NAME, migrations=_MIGRATIONS))

    async def close(self) -> None:
        """Close the database; repeated calls have no effect."""
        await self._db.close()

    async def add_file(self, row: FileRow) -> None:
        """Add a file whose content is on disk."""
        async with self._db.write() as tx:
            await _add_file(tx, row)

    async def file(self, file_id: str, owner: str) -> FileRow | None:
        """Return a file of the owner, or None."""
        row = await self._db.fetch_one(
            "SELECT * FROM files WHERE id = ? AND owner = ?", (file_id, owner)
        )
        return None if row is None else _file(row)

    async def files(self, owner: str, limit: int, after: str | None = None) -> list[FileRow]:
        """Return the owner's files, latest first, from behind the file ``after``."""
        rows = await self._page("files", owner, limit, after)
        return [_file(row) for row in rows]

    async def old_files(self, before: float) -> list[FileRow]:
        """Return files created before a time that no batch under way reads."""
        rows = await self._db.fetch_all(
            "SELECT * FROM files WHERE created_at < ? AND id NOT IN "
            f"(SELECT input_file_id FROM batches WHERE status IN {_UNDER_WAY})",
            (before,),
        )
        return [_file(row) for row in rows]

    async def file_ids(self) -> set[str]:
        """Return the ids of all files."""
        return {row["id"] for row in await self._db.fetch_all("SELECT id FROM files")}

    async def is_in_use(self, file_id: str) -> bool:
        """Return whether a batch under way reads a file."""
        row = await self._db.fetch_one(
            f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN {_UNDER_WAY}", (file_id,)
        )
        return row is not None

    async def remove_file(self, file_id: str) -> None:
        """Remove a file's row."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM files WHERE id = ?", (file_id,))

    async def bytes_of(self, owner: str | None = None) -> int:
        """Return the bytes of an owner's files and stored results, or of all."""
        row = await self._db.fetch_one(
            "SELECT (SELECT coalesce(sum(num_bytes), 0) FROM files WHERE ?1 IS NULL OR owner = ?1)"
            " + (SELECT coalesce(sum(length(body)), 0) FROM results WHERE ?1 IS NULL OR batch_id IN"
            " (SELECT id FROM batches WHERE owner = ?1)) AS num_bytes",
            (owner,),
        )
        return 0 if row is None else int(row["num_bytes"])

    async def add_batch(self, row: BatchRow) -> None:
        """Add a batch."""
        values = [_stored(getattr(row, name)) for name in _BATCH_COLUMNS]
        async with self._db.write() as tx:
            await tx.execute(_insert("batches", _BATCH_COLUMNS), values)

    async def batch(self, batch_id: str, owner: str | None = None) -> BatchRow | None:
        """Return a batch of the owner, or of anybody with None."""
        row = await self._db.fetch_one(
            "SELECT * FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", (batch_id, owner)
        )
        return None if row is None else _batch(row)

    async def batches(self, owner: str, limit: int, after: str | None = None) -> list[BatchRow]:
        """Return the owner's batches, latest first, from behind the batch ``after``."""
        rows = await self._page("batches", owner, limit, after)
        return [_batch(row) for row in rows]

    async def under_way(self, owner: str | None = None) -> list[BatchRow]:
        """Return the batches that have not ended, oldest first, of an owner or of all."""
        rows = await self._db.fetch_all(
            f"SELECT * FROM batches WHERE status IN {_UNDER_WAY} AND (?1 IS NULL OR owner = ?1) "
            "ORDER BY created_at, id",
            (owner,),
        )
        return [_batch(row) for row in rows]

    async def change(self, batch_id: str, expected: BatchStatus, **values: Any) -> bool:
        """Change fields of a batch that has the status ``expected``; return whether it had."""
        names = ", ".join(f"{name} = ?" for name in values)
        stored = [_stored(value) for value in values.values()]
        async with self._db.write() as tx:
            changed = await tx.execute(
                f"UPDATE batches SET {names} WHERE id = ? AND status = ?",
                (*stored, batch_id, expected),
            )
        return changed > 0

    async def add_result(self, batch_id: str, result: ResultRow) -> None:
        """Store a result and count it; a second result of the same line is dropped."""
        count = "num_failed" if result.has_failed else "num_completed"
        async with self._db.write(durable=False) as tx:
            added = await tx.execute(
                "INSERT INTO results VALUES (?, ?, ?, ?) ON CONFLICT DO NOTHING",
                (batch_id, result.line, result.has_failed, result.body),
            )
            if added:
                await tx.execute(
                    f"UPDATE batches SET {count} = {count} + 1 WHERE id = ?", (batch_id,)
                )

    async def done_lines(self, batch_id: str) -> set[int]:
        """Return the lines with a result."""
        rows = await self._db.fetch_all("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        return {row["line"] for row in rows}

    async def results(
        self, batch_id: str, *, has_failed: bool, after_line: int = -1, limit: int = 100
    ) -> list[ResultRow]:
        """Return some results in order of lines, behind the line ``after_line``."""
        rows = await self._db.fetch_all(
            "SELECT * FROM results WHERE batch_id = ? AND has_failed = ? AND line > ? "
            "ORDER BY line LIMIT ?",
            (batch_id, has_failed, after_line, limit),
        )
        return [ResultRow(row["line"], bool(row["has_failed"]), row["body"]) for row in rows]

    async def end(
        self, batch_id: str, status: BatchStatus, ended_at: int, files: Sequence[FileRow]
    ) -> None:
        """End a batch: add the files of its results, and drop the results.

        ``files`` have the purposes ``batch_output`` and ``batch_error``.
        """
        by_purpose = {one.purpose: one.id for one in files}
        async with self._db.write() as tx:
            for one in files:
                await _add_file(tx, one)
            await tx.execute(
                "UPDATE batches SET status = ?, ended_at = ?, output_file_id = ?, "
                "error_file_id = ? WHERE id = ?",
                (
                    status,
                    ended_at,
                    by_purpose.get("batch_output"),
                    by_purpose.get("batch_error"),
                    batch_id,
                ),
            )
            await tx.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))

    async def remove_old(self, before: float) -> None:
        """Remove batches that ended before a time."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM batches WHERE ended_at < ?", (before,))

    async def _page(
        self, table: str, owner: str, limit: int, after: str | None
    ) -> list[sqlite3.Row]:
        return await self._db.fetch_all(
            f"SELECT * FROM {table} WHERE owner = ?1 AND (?2 IS NULL OR (created_at, id) < "
            f"(SELECT created_at, id FROM {table} WHERE id = ?2 AND owner = ?1)) "
            "ORDER BY created_at DESC, id DESC LIMIT ?3",
            (owner, after, limit),
        )


async def _add_file(tx: Transaction, row: FileRow) -> None:
    values = [getattr(row, name) for name in _FILE_COLUMNS]
    await tx.execute(_insert("files", _FILE_COLUMNS), values)


def _insert(table: str, columns: Sequence[str]) -> str:
    marks = ", ".join("?" for _ in columns)
    return f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({marks})"


def _stored(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def _file(row: sqlite3.Row) -> FileRow:
    return FileRow(**{name: row[name] for name in _FILE_COLUMNS})


def _batch(row: sqlite3.Row) -> BatchRow:
    values = {name: row[name] for name in _BATCH_COLUMNS}
    parsed = {name: json.loads(row[name]) for name in ("metadata", "errors")}
    return BatchRow(**values | parsed)
