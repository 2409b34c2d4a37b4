"""SQLite's error codes in words for the daemon's operator."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpupoold.errors import Failed

_FULL = (
    "no space left for the state database {path}",
    "free some space on that disk and try again; nothing of this change was kept",
)
_LOCKED = (
    "the state database {path} is locked by another program",
    "close whatever has it open (a sqlite3 shell, a backup job) and try again",
)
_READ_ONLY = (
    "the state database {path} cannot be written",
    "check that the file and its folder belong to the user that runs gpupoold "
    "and that the disk is not mounted read-only",
)
_CANNOT_OPEN = (
    "the state database {path} cannot be opened",
    "check that its folder exists and that the user that runs gpupoold may write there",
)
_NOT_A_DATABASE = (
    "{path} is not a SQLite database",
    "move it away to start with an empty registry, or put a backup in its place",
)
_CORRUPT = (
    "the state database {path} is damaged",
    "stop gpupoold and put a backup in its place, or recover it with: sqlite3 {path} .recover",
)
_IO_ERROR = (
    "reading or writing the state database {path} failed",
    "look for disk errors in the system log",
)

# Keyed by primary result code; extended codes carry it in their low byte.
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
    """The error a user should see, or None when ``error`` is a mistake in our own SQL."""
    code = getattr(error, "sqlite_errorcode", None)
    meaning = None if code is None else _MEANINGS.get(code & 0xFF)
    if meaning is None:
        return None
    return _failed(meaning, path, str(error))


def damaged(path: Path, detail: str) -> Failed:
    """Return the error for a database whose own consistency check found ``detail``."""
    return _failed(_CORRUPT, path, detail)


def cannot_open(path: Path, detail: str) -> Failed:
    """Return the error for a file that cannot be opened, for the reason ``detail``."""
    return _failed(_CANNOT_OPEN, path, detail)


def _failed(meaning: tuple[str, str], path: Path, detail: str) -> Failed:
    message, hint = (text.format(path=path) for text in meaning)
    return Failed(f"{message}: {detail}", hint)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Convert SQLite errors caused by the disk or other programs to ``Failed``.

    Raises:
        Failed: disk full, locked, read-only, unreadable, damaged or no database.
        sqlite3.Error: any other error, a defect of the program.
    """
    try:
        yield
    except sqlite3.Error as error:
        clear = explain(error, path)
        if clear is None:
            raise
        raise clear from error
