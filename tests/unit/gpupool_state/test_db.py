"""The database itself: transactions, one writer, reads that see acknowledged writes."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from gpupool_state import Database
from gpupoold.errors import Failed

pytestmark = pytest.mark.asyncio

ADD = "INSERT INTO events VALUES (?, 0, 'info', 'k', 's', 'm')"
COUNT = "SELECT count(*) AS num FROM events"


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
