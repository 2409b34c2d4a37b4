"""The database itself: transactions, one writer, reads that see acknowledged writes."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpupool_state import Database
from gpupool_state.db import MIGRATIONS, SchemaMigration, applied, pending
from gpupoold import __version__
from gpupoold.errors import Failed, Refused

pytestmark = pytest.mark.asyncio

ADD = "INSERT INTO events VALUES (?, 0, 'info', 'k', 's', 'm')"
COUNT = "SELECT count(*) AS num FROM events"

ONE = SchemaMigration(1, "one", ("CREATE TABLE first (value TEXT)",))
TWO = SchemaMigration(2, "two", ("CREATE TABLE second (value TEXT)",))
BROKEN = SchemaMigration(2, "two", ("CREATE TABLE second (value TEXT)", "CREATE TABLE first (x)"))


async def num_events(db: Database) -> int:
    row = await db.fetch_one(COUNT)
    assert row is not None
    return int(row["num"])


async def test_a_new_database_uses_the_log_and_checks_references(db: Database) -> None:
    for durable, synchronous in ((True, 2), (False, 1), (True, 2)):
        async with db.write(durable=durable) as tx:
            modes = [
                (await tx.fetch_all(f"PRAGMA {name}"))[0][0]
                for name in ("journal_mode", "synchronous", "foreign_keys")
            ]
        assert modes == ["wal", synchronous, 1]


async def test_a_write_is_read_as_soon_as_it_is_acknowledged(db: Database) -> None:
    async with db.write() as tx:
        assert await tx.execute(ADD, (1,)) == 1
        assert (await tx.fetch_one(COUNT) or [None])[0] == 1
        assert await num_events(db) == 0, "a reader must not see an open transaction"
    assert await num_events(db) == 1


async def test_fetch_one_of_nothing_is_none(db: Database) -> None:
    assert await db.fetch_one("SELECT * FROM events") is None


async def test_an_error_in_the_block_rolls_everything_back(db: Database) -> None:
    async def write_and_fail() -> None:
        async with db.write() as tx:
            await tx.execute_many(ADD, [(1,), (2,)])
            raise LookupError

    with pytest.raises(LookupError):
        await write_and_fail()
    assert await num_events(db) == 0
    async with db.write() as tx:
        await tx.execute(ADD, (3,))
    assert await num_events(db) == 1


async def test_a_mistake_in_sql_is_not_dressed_up(db: Database) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        async with db.write() as tx:
            await tx.execute("INSERT INTO nowhere VALUES (1)")


async def test_concurrent_writers_take_turns(db: Database) -> None:
    async def add_one() -> None:
        async with db.write() as tx:
            rows = await tx.fetch_all(COUNT)
            await asyncio.sleep(0)
            await tx.execute(ADD, (rows[0]["num"] + 1,))  # clashes if another came between

    await asyncio.gather(*(add_one() for _ in range(50)))
    assert await num_events(db) == 50


async def test_readers_do_not_wait_for_a_writer(db: Database) -> None:
    async with db.write() as tx:
        await tx.execute(ADD, (1,))
        counts = await asyncio.wait_for(asyncio.gather(*(num_events(db) for _ in range(10))), 5)
    assert counts == [0] * 10


async def test_the_reader_cannot_write(db: Database) -> None:
    with pytest.raises(Failed, match="cannot be written"):
        await db.fetch_all(ADD, (1,))


async def test_nesting_is_an_error_not_a_deadlock(db: Database) -> None:
    async with db.write():
        with pytest.raises(RuntimeError, match="inside another"):
            async with db.write():
                pass


async def test_a_transaction_cannot_be_used_after_its_end(db: Database) -> None:
    async with db.write() as tx:
        pass
    with pytest.raises(RuntimeError, match="has ended"):
        await tx.execute(ADD, (1,))


@pytest.mark.parametrize("num_steps", range(12))
async def test_cancelling_at_any_moment_leaves_all_or_nothing(db: Database, num_steps: int) -> None:
    acknowledged = False

    async def write() -> None:
        nonlocal acknowledged
        async with db.write() as tx:
            await tx.execute(ADD, (1,))
            await tx.execute(ADD, (2,))
        acknowledged = True

    task = asyncio.create_task(write())
    for _ in range(num_steps):
        await asyncio.sleep(0.0002)
    task.cancel()
    await asyncio.wait([task])
    count = await num_events(db)
    assert count == 2 if acknowledged else count in (0, 2)
    async with db.write() as tx:
        await tx.execute(ADD, (3,))
    assert await num_events(db) == count + 1


async def test_close_waits_for_the_write_under_way_and_is_final(path: Path) -> None:
    db = await Database.open(path)
    inside = asyncio.Event()

    async def write() -> None:
        async with db.write() as tx:
            inside.set()
            await asyncio.sleep(0.02)
            await tx.execute(ADD, (1,))

    task = asyncio.create_task(write())
    await inside.wait()
    await db.close()
    await task
    await db.close()
    with pytest.raises(Failed, match="is closed"):
        await db.fetch_all(COUNT)
    with pytest.raises(Failed, match="is closed"):
        async with db.write():
            pass
    async with await Database.open(path) as again:
        assert await num_events(again) == 1


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
