"""Kills processes while they write to a state database, and looks at what is left.

A program of its own: it forks its children, so that each begins with all modules loaded, and
nothing of the test's own process with them. Prints one line of JSON, or fails with what it found.

    python -m tests.unit.gpupool_state.kill_children FOLDER changes|upgrade NUM_KILLS SEED
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import json
import os
import random
import signal
import sqlite3
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from gpupool_state import DATABASE_NAME, Database, History, MinuteRow, Registry, db as migrations
from gpupool_state.db import MIGRATIONS, SchemaMigration
from gpupoold.domain import ModelName, ModelSpec, ModelState

# A database is used for so many kills: then it would take longer to check than to write.
_KILLS_PER_DATABASE = 40
_LONGEST_DELAY_S = 0.004
_PADDING_ROWS = 1500

_NUM_STEPS = 8
_PRESENT = MIGRATIONS[-1].number
_NEWEST = _PRESENT + _NUM_STEPS
_FURTHER = tuple(
    SchemaMigration(number, f"further-{number}", (f"ALTER TABLE events ADD COLUMN c{number}",))
    for number in range(_PRESENT + 1, _NEWEST + 1)
)

Rows = dict[str, list[dict[str, object]]]


# Being killed


class Victim:
    """A child that runs ``work``; what it writes to its pipe is its word for what is done."""

    def __init__(self, work: Callable[[int], None]) -> None:
        reader, writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.close(reader)
            with suppress(BaseException):
                work(writer)
            os._exit(1)
        os.close(writer)
        self._reader = reader

    def kill_after(self, delay_s: float, *, num_words: int = 0, word: bytes = b"") -> bytes:
        """All that it said before it was killed, the given time after so many bytes or a word."""
        said = b""
        while len(said) < num_words or word not in said:
            piece = os.read(self._reader, 1)
            assert piece, "the child ended by itself"
            said += piece
        time.sleep(delay_s)
        os.kill(self._pid, signal.SIGKILL)
        while piece := os.read(self._reader, 65536):
            said += piece
        os.close(self._reader)
        _, status = os.waitpid(self._pid, 0)
        assert os.WIFSIGNALED(status), "the child ended by itself"
        return said


# Changes to the registry and the history


def _run_changes(path: Path, run: int, pipe: int) -> None:
    asyncio.run(_change_for_ever(path, run, pipe))


async def _change_for_ever(path: Path, run: int, pipe: int) -> None:
    """Says ``r`` after each change of the registry, ``h`` when the history up to it is written."""
    db = await Database.open(path)
    registry, history = Registry(db), History(db, flush_interval_s=0.001)
    await history.start()
    os.write(pipe, b"o")
    for number in itertools.count():
        history.record_event("info", "model_changed", f"{run}-{number}", "x" * 100)
        history.record_minute(_minute(run, number))
        await _change(registry, run, number)
        os.write(pipe, b"r")
        if number % 3 == 2 and await history.flush():
            os.write(pipe, b"h")


def _minute(run: int, number: int) -> MinuteRow:
    return MinuteRow(minute_at=number, model=str(run))


async def _change(registry: Registry, run: int, number: int) -> None:
    """Number 0 and 1 of four add a model, 2 changes the second, 3 removes the first."""
    if number % 4 == 3:
        await registry.remove(f"m{run}-{number - 3}")
    elif number % 4 == 2:
        await registry.set_state(f"m{run}-{number - 1}", ModelState.READY)
    else:
        name = ModelName(f"m{run}-{number}")
        await registry.add(ModelSpec(name, "s", "/p", aliases=(f"a-{name}",)))


def _state_after(run: int, num_changes: int) -> dict[str, str]:
    """The models that a run leaves after its first changes, with their states."""
    models: dict[str, str] = {}
    for number in range(num_changes):
        if number % 4 == 3:
            del models[f"m{run}-{number - 3}"]
        elif number % 4 == 2:
            models[f"m{run}-{number - 1}"] = "ready"
        else:
            models[f"m{run}-{number}"] = "registered"
    return models


def kill_during_changes(folder: Path, num_kills: int, rng: random.Random) -> dict[str, int]:
    """Kill ``num_kills`` children; every change that one has told of must be there."""
    said = Counter[str]()
    before: dict[str, str] = {}
    for run in range(num_kills):
        path = folder / f"{run // _KILLS_PER_DATABASE}" / DATABASE_NAME
        if run % _KILLS_PER_DATABASE == 0:
            path.parent.mkdir()
            before = {}
        victim = Victim(functools.partial(_run_changes, path, run))
        # Some are killed before they have opened the database, most while they write.
        num_words = 0 if run % 10 == 0 else rng.randint(1, 8)
        longest_s = _LONGEST_DELAY_S * (5 if num_words == 0 else 1)
        words = victim.kill_after(rng.uniform(0, longest_s), num_words=num_words).decode()
        said.update(words)
        before = _check(path, run, words, before)
    return {"kills": num_kills, "changes": said["r"], "flushes": said["h"], "opened": said["o"]}


def _check(path: Path, run: int, words: str, before: dict[str, str]) -> dict[str, str]:
    """The models that are there after a kill."""
    assert is_sound(path) or not words
    with closing(sqlite3.connect(path)) as connection:
        if not words and not _has_tables(connection):
            return before  # killed before the first had made it
        found = dict(connection.execute("SELECT name, state FROM models").fetchall())
        # The change under way may or may not be there, whole.
        num = words.count("r")
        possible = [before | _state_after(run, count) for count in (num, num + 1)]
        assert found in possible, f"run {run}: after {words!r} there is {found}"
        aliases = connection.execute("SELECT alias, model FROM aliases").fetchall()
        assert sorted(aliases) == sorted((f"a-{name}", name) for name in found)
        _check_history(connection, run, 3 * words.count("h"))
    return found


def _has_tables(connection: sqlite3.Connection) -> bool:
    rows = connection.execute("SELECT name FROM sqlite_master WHERE name = 'slo_minutes'")
    return bool(rows.fetchall())


def _check_history(connection: sqlite3.Connection, run: int, num_written: int) -> None:
    """All rows whose writing was told of, without gaps, and perhaps some that came after."""
    events = connection.execute(
        "SELECT subject FROM events WHERE subject LIKE ? ORDER BY id", (f"{run}-%",)
    ).fetchall()
    assert len(events) >= num_written
    assert events == [(f"{run}-{number}",) for number in range(len(events))]
    minutes = connection.execute(
        "SELECT minute_at FROM slo_minutes WHERE model = ? ORDER BY id", (str(run),)
    ).fetchall()
    assert minutes == [(number,) for number in range(len(events))]


# Changes of the schema


def kill_during_upgrade(folder: Path, num_kills: int, rng: random.Random) -> dict[str, int]:
    """Kill ``num_kills`` children while they copy the database and change its schema."""
    told = Counter[str]()
    original = folder / "original.db"
    asyncio.run(_make(original))
    before = rows_of(original)
    for run in range(num_kills):
        path = folder / str(run) / DATABASE_NAME
        path.parent.mkdir()
        path.write_bytes(original.read_bytes())
        victim = Victim(functools.partial(_upgrade, path))
        # After the word for: it begins to copy, the copy is whole, the schema is changed.
        word = (b"b", b"s", b"d")[run % 3]
        longest_s = 0.02 if word == b"b" else _LONGEST_DELAY_S
        words = victim.kill_after(rng.uniform(0, longest_s), word=word).decode()
        told.update([words])
        _check_upgrade(path, before, words)
        asyncio.run(_open(path))
        assert number_of(path) == _NEWEST
        assert has_kept(before, rows_of(path))
        backup = path.with_name(f"{path.name}.bak-{_PRESENT}")
        assert rows_of(backup) == before
        assert not list(path.parent.glob("*.part"))
    return {"kills": num_kills, **dict(sorted(told.items()))}


def _upgrade(path: Path, pipe: int) -> None:
    _tell_before(Database, "copy_to", pipe, b"b")
    _tell_before(migrations, "_apply", pipe, b"s")
    asyncio.run(_open(path))
    os.write(pipe, b"d")
    time.sleep(60)


def _tell_before(owner: Any, name: str, pipe: int, word: bytes) -> None:
    whole = getattr(owner, name)

    async def telling(*args: Any) -> None:
        os.write(pipe, word)
        await whole(*args)

    setattr(owner, name, telling)


async def _open(path: Path) -> None:
    await (await Database.open(path, migrations=(*MIGRATIONS, *_FURTHER))).close()


async def _make(path: Path) -> None:
    """A database of the present schema, with rows that make a copy take some time."""
    async with await Database.open(path) as db:
        await _change(Registry(db), 0, 0)
        async with db.write() as tx:
            await tx.execute_many(
                "INSERT INTO events (at, level, kind, subject, message) VALUES (0, '', '', '', ?)",
                [("x" * 300,)] * _PADDING_ROWS,
            )


def rows_of(path: Path) -> Rows:
    """All rows by table, but for the schema's own."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
        names = [name for (name,) in found if name != "schema_migrations"]
        return {
            name: [dict(row) for row in connection.execute(f"SELECT * FROM {name} ORDER BY rowid")]
            for name in names
        }


def has_kept(before: Rows, after: Rows) -> bool:
    """Return whether all rows are there with their values, perhaps with more columns."""
    return all(
        len(after[table]) == len(rows)
        and all(old.items() <= new.items() for old, new in zip(rows, after[table], strict=True))
        for table, rows in before.items()
    )


def is_sound(path: Path) -> bool:
    """Return whether SQLite finds nothing wrong with a database."""
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


def number_of(path: Path) -> int:
    """A database's schema."""
    with closing(sqlite3.connect(path)) as connection:
        (number,) = connection.execute("SELECT max(number) FROM schema_migrations").fetchone()
        return int(number)


def _check_upgrade(path: Path, before: Rows, words: str) -> None:
    """The database is as it was or has been taken forward; a finished copy is whole."""
    assert is_sound(path)
    assert has_kept(before, rows_of(path))
    # Each step is a change of its own.
    oldest = _NEWEST if "d" in words else _PRESENT
    assert oldest <= number_of(path) <= _NEWEST
    backup = path.with_name(f"{path.name}.bak-{_PRESENT}")
    assert backup.exists() or "s" not in words
    if backup.exists():
        assert is_sound(backup)
        assert rows_of(backup) == before


def main() -> None:
    """See the module."""
    folder, what, num_kills, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    works = {"changes": kill_during_changes, "upgrade": kill_during_upgrade}
    # Collecting in a child would touch, and so copy, the pages that it shares with this process.
    gc.collect()
    gc.freeze()
    print(json.dumps(works[what](folder, num_kills, random.Random(seed))))


if __name__ == "__main__":
    main()
