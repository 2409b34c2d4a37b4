"""The schema's steps: taken once, in order, whole or not at all."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpupool_state import Database
from gpupool_state.db import MIGRATIONS, SchemaMigration, applied, pending
from gpupoold import __version__
from gpupoold.errors import Failed, Refused

pytestmark = pytest.mark.asyncio

ONE = SchemaMigration(1, "one", ("CREATE TABLE first (value TEXT)",))
TWO = SchemaMigration(2, "two", ("CREATE TABLE second (value TEXT)",))
BROKEN = SchemaMigration(2, "two", ("CREATE TABLE second (value TEXT)", "CREATE TABLE first (x)"))


def tables(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        return {name for (name,) in connection.execute("SELECT name FROM sqlite_master")}


def execute(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(sql)
        connection.commit()


async def test_the_released_steps_are_numbered_without_gaps() -> None:
    assert [step.number for step in MIGRATIONS] == list(range(1, len(MIGRATIONS) + 1))
    assert len({step.name for step in MIGRATIONS}) == len(MIGRATIONS)


async def test_the_schema_has_the_tables_in_use_and_no_others(db: Database) -> None:
    rows = await db.fetch_all("SELECT name FROM sqlite_master WHERE type = 'table'")
    in_use = {"models", "aliases", "profiles", "requests", "switches", "events"}
    in_use |= {"slo_minutes", "api_keys", "divisions", "usage_hours", "device_minutes"}
    in_use.add("schema_migrations")
    assert {row["name"] for row in rows} == in_use


async def test_applied_and_pending(path: Path) -> None:
    async with await Database.open(path, migrations=[ONE]) as db:
        (step,) = await applied(db)
        assert (step.number, step.name) == (1, "one")
        assert step.applied_at > 1_700_000_000
        assert await pending(db, [ONE, TWO]) == (TWO,)
        assert await pending(db, [ONE]) == ()


async def test_a_second_open_takes_no_step_and_no_backup(path: Path) -> None:
    for _ in range(2):
        async with await Database.open(path) as db:
            assert await pending(db) == ()
    assert {file.name for file in path.parent.iterdir()} == {path.name}


async def test_an_older_database_is_copied_before_it_is_changed(path: Path) -> None:
    async with await Database.open(path, migrations=[ONE]) as db, db.write() as tx:
        await tx.execute("INSERT INTO first VALUES ('kept')")
    async with await Database.open(path, migrations=[ONE, TWO]) as db:
        assert [step.number for step in await applied(db)] == [1, 2]
    backup = path.with_name(f"{path.name}.bak-1")
    assert tables(backup) == {"schema_migrations", "first"}
    with closing(sqlite3.connect(backup)) as connection:
        assert connection.execute("SELECT value FROM first").fetchall() == [("kept",)]
    async with await Database.open(backup, migrations=[ONE]) as old:
        assert [step.number for step in await applied(old)] == [1]
    assert not list(path.parent.glob("*.part"))


async def test_a_failing_step_leaves_nothing_and_can_be_tried_again(path: Path) -> None:
    await (await Database.open(path, migrations=[ONE])).close()
    for _ in range(2):
        with pytest.raises(Failed, match=r"schema step 2 \(two\).*failed.*first already exists"):
            await Database.open(path, migrations=[ONE, BROKEN])
        assert tables(path) == {"schema_migrations", "first"}
    async with await Database.open(path, migrations=[ONE, TWO]) as db:
        assert [step.number for step in await applied(db)] == [1, 2]


async def test_steps_before_the_failing_one_stay(path: Path) -> None:
    with pytest.raises(Failed, match="schema step 2"):
        await Database.open(path, migrations=[ONE, BROKEN])
    assert tables(path) == {"schema_migrations", "first"}


async def test_a_newer_schema_is_refused_with_both_versions(path: Path) -> None:
    await (await Database.open(path, migrations=[ONE, TWO])).close()
    execute(path, "UPDATE schema_migrations SET gpupool_version = '7.8.9' WHERE number = 2")
    versions = rf"schema version 2.*gpupool 7\.8\.9.*gpupool {__version__}.*up to 1"
    with pytest.raises(Refused, match=versions) as caught:
        await Database.open(path, migrations=[ONE])
    assert "install gpupool 7.8.9" in caught.value.hint
    assert "bak-1" in caught.value.hint
    assert "second" in tables(path)


async def test_another_history_of_steps_is_refused(path: Path) -> None:
    await (await Database.open(path, migrations=[ONE])).close()
    with pytest.raises(Refused, match=r"'one'.*'uno'"):
        await Database.open(path, migrations=[SchemaMigration(1, "uno", ())])


async def test_a_backup_that_cannot_be_written_stops_the_change(path: Path) -> None:
    await (await Database.open(path, migrations=[ONE])).close()
    path.with_name(f"{path.name}.bak-1").mkdir()
    with pytest.raises(Failed, match="backup") as caught:
        await Database.open(path, migrations=[ONE, TWO])
    assert "was not changed" in caught.value.hint
    assert "second" not in tables(path)
