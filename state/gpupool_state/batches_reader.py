"""Batches as processes see them that do not own the database."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from gpupool_state.batches import BATCHES_NAME, WORK_COLUMNS, BatchRow, batch_of
from gpupool_state.faults import explained


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
