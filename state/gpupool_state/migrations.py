"""The schema as numbered steps, applied to a database in order."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gpupool_state.schema import BATCHES_SCHEMA, STATE_SCHEMA
from gpupool_state.writer import Source, Writer, emptied, explain
from gpupoold import __version__
from gpupoold.errors import Failed, Refused
from gpupoold.system import durable

_BOOKKEEPING = """
CREATE TABLE IF NOT EXISTS schema_migrations (
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL,
    applied_at REAL NOT NULL,
    gpupool_version TEXT NOT NULL
)
"""


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
    writer: Writer,
    path: Path,
    migrations: Sequence[SchemaMigration] = MIGRATIONS,
    traces: Sequence[str] = (),
) -> tuple[SchemaMigration, ...]:
    """Update the database at ``path``; return the applied steps.

    A step and the row that records the step are one transaction, so a failed step leaves the
    database unchanged and is repeated by the next call. An older database is first copied to
    ``<path>.bak-<number>``, with the number of the last applied step.

    ``traces`` are the names of files beside the database that an earlier database left.

    Raises:
        Refused: the schema is newer than this program, or not gpupool's; or the database has no
            schema in spite of ``traces``.
        Failed: a step or the backup failed.
    """
    done = await applied(writer)
    if traces and not done and not await _tables(writer) - {"schema_migrations"}:
        raise emptied(path, traces)
    await _check_known(writer, path, done, migrations)
    todo = await pending(writer, migrations)
    if done and todo:
        await _back_up(writer, path, done[-1].number)
    for step in todo:
        await _apply(writer, path, step)
    return todo


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


async def _back_up(writer: Writer, path: Path, number: int) -> None:
    target = path.with_name(f"{path.name}.bak-{number}")
    unfinished = target.with_name(f"{target.name}.part")
    try:
        unfinished.unlink(missing_ok=True)
        await writer.copy_to(unfinished)
        durable.replace(unfinished, target)
    except (OSError, Failed) as error:
        raise Failed(
            f"the backup {target} before changing the schema could not be written: {error}",
            "free some space in the folder and start again; the database was not changed",
        ) from error


async def _apply(writer: Writer, path: Path, step: SchemaMigration) -> None:
    try:
        async with writer.transaction() as tx:
            await tx.execute(_BOOKKEEPING)
            for statement in step.statements:
                await tx.execute(statement)
            await tx.execute(
                "INSERT INTO schema_migrations (number, name, applied_at, gpupool_version) "
                "VALUES (?, ?, ?, ?)",
                (step.number, step.name, time.time(), __version__),
            )
    except (sqlite3.Error, Failed) as error:
        detail = explain(error, path) or error if isinstance(error, sqlite3.Error) else error
        raise Failed(
            f"schema step {step.number} ({step.name}) of {path} failed: {detail}",
            "the database was not changed by the step; repair the cause and start again",
        ) from error
