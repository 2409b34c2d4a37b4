"""Files and batches of clients: a database of its own, used by all frontends.

``owner`` is the public id of an API key, empty without a key; a query with an owner sees only the
owner's rows. Times are wall-clock seconds. The results of a batch are rows until the batch has
ended, so that a result is either stored once or not at all.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, Self

from gpupool_state.db import BATCH_MIGRATIONS, Database, Source, Transaction, explained
from gpupool_state.lock import turn
from gpupoold.domain import BatchRecord

BATCHES_NAME = "batches.db"
_NOT_EXPIRED = "(expires_at IS NULL OR expires_at > CAST(strftime('%s', 'now') AS INTEGER))"
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
Order = Literal["asc", "desc"]


@dataclass(frozen=True, slots=True)
class FileRow:
    """A file; its content is in the folder of files under its id."""

    id: str
    owner: str
    purpose: str
    filename: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, kw_only=True)
class BatchRow(BatchRecord):
    """A batch as stored. ``completion_window`` is as the client wrote it.

    ``errors`` has the problems of an invalid input file, as JSON objects of the API.
    ``waits_because`` is the reason if requests wait for a further try. Files of results are kept
    for ``output_expires_after_s``.
    """

    owner: str
    input_file_id: str
    completion_window: str
    status: BatchStatus = "validating"
    metadata: dict[str, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    cancelling_at: int | None = None
    waits_because: str = ""
    output_expires_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What an owner has: bytes of files, results and rows; files; batches."""

    num_bytes: int = 0
    num_files: int = 0
    num_batches: int = 0


CheckAccount = Callable[[Account, int], None]
"""Raises an error if an owner has too much, or all owners together have too many bytes."""


@dataclass(frozen=True, slots=True)
class ResultRow:
    """The result of the request in line ``line`` (from 0) of the input file, as a line of JSON."""

    line: int
    has_failed: bool
    body: bytes


_BATCH_COLUMNS = tuple(field.name for field in fields(BatchRow))
_JSON_COLUMNS = ("metadata", "errors", "models")
# Without the texts that only clients read, which may be long.
WORK_COLUMNS = tuple(name for name in _BATCH_COLUMNS if name not in ("metadata", "errors"))


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
        async with turn(folder / "batches.lock"):  # the frontends begin at the same time
            return cls(await Database.open(folder / BATCHES_NAME, migrations=BATCH_MIGRATIONS))

    async def close(self) -> None:
        """Close the database; repeated calls have no effect."""
        await self._db.close()

    async def add_file(self, row: FileRow, check: CheckAccount | None = None) -> None:
        """Add a file whose content is on disk.

        Raises:
            Exception: an error of ``check``; nothing is added.
        """
        async with self._db.write() as tx:
            await tx.insert("files", asdict(row))
            await _check(tx, row.owner, check)

    async def file(self, file_id: str, owner: str) -> FileRow | None:
        """Return a file of the owner, or None; an expired file is none."""
        row = await self._db.fetch_one(
            f"SELECT * FROM files WHERE id = ? AND owner = ? AND {_NOT_EXPIRED}", (file_id, owner)
        )
        return None if row is None else FileRow(**dict(row))

    async def files(
        self,
        owner: str,
        limit: int,
        after: str | None = None,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> list[FileRow]:
        """Return the owner's files by the time of creation, from behind the file ``after``."""
        condition = f"{_NOT_EXPIRED} AND (?4 IS NULL OR purpose = ?4)"
        rows = await self._page("files", owner, limit, after, order, condition, purpose)
        return [FileRow(**dict(row)) for row in rows]

    async def old_files(self, before: float) -> list[FileRow]:
        """Return files that have expired, or were created before a time, and that no batch under
        way reads.
        """
        rows = await self._db.fetch_all(
            f"SELECT * FROM files WHERE (created_at < ? OR NOT {_NOT_EXPIRED}) AND id NOT IN "
            "(SELECT input_file_id FROM batches WHERE ended_at IS NULL) LIMIT 1000",
            (before,),
        )
        return [FileRow(**dict(row)) for row in rows]

    async def file_ids(self) -> set[str]:
        """Return the ids of all files."""
        return {row["id"] for row in await self._db.fetch_all("SELECT id FROM files")}

    async def is_in_use(self, file_id: str) -> bool:
        """Return whether a batch under way reads a file."""
        row = await self._db.fetch_one(
            "SELECT 1 FROM batches WHERE input_file_id = ? AND ended_at IS NULL", (file_id,)
        )
        return row is not None

    async def remove_file(self, file_id: str) -> None:
        """Remove a file's row."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM files WHERE id = ?", (file_id,))

    async def account(self, owner: str) -> Account:
        """Return what an owner has."""
        return await _account(self._db, owner)

    async def num_bytes(self) -> int:
        """Return the bytes of all owners."""
        return await _num_bytes(self._db)

    async def add_batch(self, row: BatchRow, check: CheckAccount | None = None) -> None:
        """Add a batch.

        Raises:
            Exception: an error of ``check``; nothing is added.
        """
        values = {name: _stored(getattr(row, name)) for name in _BATCH_COLUMNS}
        async with self._db.write() as tx:
            await tx.insert("batches", values)
            await _check(tx, row.owner, check)

    async def batch(self, batch_id: str, owner: str | None = None) -> BatchRow | None:
        """Return a batch of the owner, or of anybody with None."""
        row = await self._db.fetch_one(
            "SELECT * FROM batches WHERE id = ?1 AND (?2 IS NULL OR owner = ?2)", (batch_id, owner)
        )
        return None if row is None else batch_of(row)

    async def batches(
        self, owner: str, limit: int, after: str | None = None, order: Order = "desc"
    ) -> list[BatchRow]:
        """Return the owner's batches by the time of creation, from behind the batch ``after``."""
        rows = await self._page("batches", owner, limit, after, order)
        return [batch_of(row) for row in rows]

    async def under_way(self) -> list[BatchRow]:
        """Return the batches that have not ended, oldest first, without metadata and errors."""
        rows = await self._db.fetch_all(
            f"SELECT {', '.join(WORK_COLUMNS)} FROM batches WHERE ended_at IS NULL "
            "ORDER BY created_at, id"
        )
        return [batch_of(row) for row in rows]

    async def num_under_way(self, owner: str) -> int:
        """Return how many batches of an owner have not ended."""
        row = await self._db.fetch_one(
            "SELECT count(*) AS num FROM batches WHERE owner = ? AND ended_at IS NULL", (owner,)
        )
        return 0 if row is None else int(row["num"])

    async def change(self, batch_id: str, expected: BatchStatus, **values: Any) -> bool:
        """Change fields of a batch that has the status ``expected``; return whether it had."""
        stored = {name: _stored(value) for name, value in values.items()}
        async with self._db.write() as tx:
            where = {"id": batch_id, "status": expected}
            return await tx.update("batches", where, **stored) > 0

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
                    f"UPDATE batches SET {count} = {count} + 1, result_bytes = result_bytes + "
                    "(SELECT length(body) + 64 FROM results WHERE batch_id = ?1 AND line = ?2) "
                    "WHERE id = ?1",
                    (batch_id, result.line),
                )
            await _end_line(tx, batch_id, result.line)

    async def begin_line(self, batch_id: str, line: int, num_times: int) -> None:
        """Note that a request is asked for the ``num_times``-th time without an answer so far."""
        async with self._db.write(durable=False) as tx:
            values = (batch_id, line, num_times)
            await tx.execute("INSERT OR REPLACE INTO asked VALUES (?, ?, ?)", values)

    async def end_line(self, batch_id: str, line: int) -> None:
        """Note that a request was answered, though without a result."""
        async with self._db.write(durable=False) as tx:
            await _end_line(tx, batch_id, line)

    async def asked(self) -> dict[tuple[str, int], int]:
        """Return how often requests without any answer were asked, by batch and line."""
        rows = await self._db.fetch_all("SELECT batch_id, line, num_times FROM asked")
        return {(row["batch_id"], row["line"]): row["num_times"] for row in rows}

    async def forget_asked(self) -> None:
        """Note that no request under way is to blame for the end of the process."""
        async with self._db.write(durable=False) as tx:
            await tx.execute("DELETE FROM asked")

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
        by_purpose = {file.purpose: file.id for file in files}
        async with self._db.write() as tx:
            for file in files:
                await tx.insert("files", asdict(file))
            await tx.update(
                "batches",
                {"id": batch_id},
                status=status,
                ended_at=ended_at,
                output_file_id=by_purpose.get("batch_output"),
                error_file_id=by_purpose.get("batch_error"),
                result_bytes=0,
                waits_because="",
                next_try_at=None,
            )
            await tx.execute("DELETE FROM results WHERE batch_id = ?", (batch_id,))
            await tx.execute("DELETE FROM asked WHERE batch_id = ?", (batch_id,))

    async def remove_old(self, before: float) -> None:
        """Remove batches that ended before a time."""
        async with self._db.write() as tx:
            await tx.execute("DELETE FROM batches WHERE ended_at < ?", (before,))

    async def _page(
        self,
        table: str,
        owner: str,
        limit: int,
        after: str | None,
        order: Order,
        condition: str = "?4 IS NULL",
        value: str | None = None,
    ) -> list[sqlite3.Row]:
        sign = "<" if order == "desc" else ">"
        return await self._db.fetch_all(
            f"SELECT * FROM {table} WHERE owner = ?1 AND (?2 IS NULL OR (created_at, id) {sign} "
            f"(SELECT created_at, id FROM {table} WHERE id = ?2 AND owner = ?1)) AND {condition} "
            f"ORDER BY created_at {order}, id {order} LIMIT ?3",
            (owner, after, limit, value),
        )


async def _account(source: Source, owner: str) -> Account:
    rows = await source.fetch_all(
        "SELECT num_bytes, num_files, num_batches FROM accounts WHERE owner = ?", (owner,)
    )
    return Account(*rows[0]) if rows else Account()


async def _num_bytes(source: Source) -> int:
    [row] = await source.fetch_all("SELECT coalesce(sum(num_bytes), 0) FROM accounts")
    return int(row[0])


async def _check(tx: Transaction, owner: str, check: CheckAccount | None) -> None:
    if check is not None:
        check(await _account(tx, owner), await _num_bytes(tx))


async def _end_line(tx: Transaction, batch_id: str, line: int) -> None:
    await tx.execute("DELETE FROM asked WHERE batch_id = ? AND line = ?", (batch_id, line))


def _stored(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value


def batch_of(row: sqlite3.Row) -> BatchRow:
    """Return a row, whose columns may be a part of all."""
    values = {name: row[name] for name in _BATCH_COLUMNS if name in row.keys()}  # noqa: SIM118
    parsed = {name: json.loads(values[name]) for name in _JSON_COLUMNS if name in values}
    return BatchRow(**values | parsed)


def read_batches(folder: Path, limit: int, *, with_ended: bool) -> list[BatchRow]:
    """Return batches of all owners, the latest first, without metadata and errors; blocking.

    Nothing is created or changed.
    """
    path = folder / BATCHES_NAME
    if not path.exists():
        return []
    with explained(path), closing(_open_reader(path)) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(WORK_COLUMNS)} FROM batches WHERE ?1 OR ended_at IS NULL "
            "ORDER BY created_at DESC, id DESC LIMIT ?2",
            (with_ended, limit),
        )
        return [batch_of(row) for row in rows]


def _open_reader(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=1.0)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA query_only = ON")
    return connection
