"""Messages for SQLite's errors, with remedies for the operator."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

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
