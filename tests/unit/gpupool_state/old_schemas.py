"""Databases of every released schema, as the code of their time made them."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from gpupool_state.migrations import MIGRATIONS

FOLDER = Path(__file__).parent / "schemas"
NEWEST = MIGRATIONS[-1].number

_COLUMNS = {"instance": "device"}

Rows = dict[str, list[dict[str, object]]]


def make(path: Path, number: int) -> None:
    """The database of a schema; see ``scripts/make_state_fixture.py``."""
    script = (FOLDER / f"schema-{number}.sql").read_text(encoding="utf-8")
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(script)


def rows_of(path: Path) -> Rows:
    """All rows by table, but for the schema's own."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        names = [
            name
            for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            if name != "schema_migrations"
        ]
        return {
            name: [dict(row) for row in connection.execute(f"SELECT * FROM {name} ORDER BY rowid")]
            for name in names
        }


def has_kept(before: Rows, after: Rows) -> bool:
    """Return whether all rows are there with their values, perhaps with more columns.

    Schema 7 renamed the columns ``instance`` and three kinds of events.
    """
    if any("device" in row for row in after.get("requests", ())):
        before = {table: [_renamed(row) for row in rows] for table, rows in before.items()}
    return all(
        len(after[table]) == len(rows)
        and all(old.items() <= new.items() for old, new in zip(rows, after[table], strict=True))
        for table, rows in before.items()
    )


def _renamed(row: dict[str, object]) -> dict[str, object]:
    kinds: dict[object, str] = {
        "instance_ready": "worker_ready",
        "instance_down": "worker_down",
        "image_refused": "snapshot_refused",
    }
    row = {_COLUMNS.get(name, name): value for name, value in row.items()}
    return row | {"kind": kinds.get(row["kind"], row["kind"])} if "kind" in row else row


def is_sound(path: Path) -> bool:
    """Return whether SQLite finds nothing wrong with a database."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def number_of(path: Path) -> int:
    """A database's schema."""
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("SELECT max(number) FROM schema_migrations").fetchone()
        return int(number)
