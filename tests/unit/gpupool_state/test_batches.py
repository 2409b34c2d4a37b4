"""Files and batches: accounts equal the rows."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpupool_state.batches import (
    BATCHES_NAME,
    Account,
    BatchRow,
    BatchStore,
    FileRow,
    ResultRow,
    read_batches,
)

pytestmark = pytest.mark.asyncio


def file(file_id: str, num_bytes: int = 5, owner: str = "a", at: int = 1) -> FileRow:
    return FileRow(file_id, owner, "batch", "näme", num_bytes, at)


def batch(batch_id: str, owner: str = "a", file_id: str = "f") -> BatchRow:
    metadata = {"key": "\N{GRINNING FACE}" * 20}
    return BatchRow(
        batch_id,
        "/v1/completions",
        1,
        9,
        owner=owner,
        input_file_id=file_id,
        completion_window="1h",
        metadata=metadata,
    )


async def recounted(store: BatchStore, owner: str) -> Account:
    """The account as the rows say."""
    files = await store.files(owner, 1000)
    batches = await store.batches(owner, 1000)
    num_bytes = sum(max(4096, one.num_bytes) + 256 + len(one.filename.encode()) for one in files)
    for one in batches:
        texts = await store._db.fetch_one(
            "SELECT metadata, errors, models FROM batches WHERE id = ?", (one.id,)
        )
        assert texts is not None
        num_bytes += 512 + sum(len(text.encode()) for text in texts)
        for has_failed in (False, True):
            found = await store.results(one.id, has_failed=has_failed, limit=1000)
            num_bytes += sum(len(result.body) + 64 for result in found)
    return Account(num_bytes, len(files), len(batches))


async def test_accounts_equal_the_rows_at_each_step(tmp_path: Path) -> None:
    store, dice = await BatchStore.open(tmp_path), random.Random(5)
    for number in range(120):
        owner = dice.choice("ab")
        files = [one.id for one in await store.files(owner, 1000)]
        batches = [one for one in await store.batches(owner, 1000) if one.ended_at is None]
        match dice.randrange(7):
            case 0 | 1:
                await store.add_file(file(f"f{number}", dice.randrange(9000), owner))
            case 2:
                await store.add_batch(batch(f"b{number}", owner))
            case 3 if files:
                await store.remove_file(dice.choice(files))
            case 4 | 5 if batches:
                result = ResultRow(dice.randrange(4), dice.random() < 0.3, b"x" * number)
                await store.add_result(dice.choice(batches).id, result)
            case 6 if batches:
                one = dice.choice(batches)
                await store.change(one.id, one.status, errors=[{"message": "\u00e4" * number}])
                output = FileRow(f"o{number}", owner, "batch_output", "o", 9, 2)
                await store.end(one.id, "completed", number, [output])
                await store.remove_old(number - 10)
        for one_owner in "ab":
            assert await store.account(one_owner) == await recounted(store, one_owner)
    total = [(await store.account(owner)).num_bytes for owner in "ab"]
    assert await store.num_bytes() == sum(total)
    assert min(total) > 0
    await store.close()


async def test_what_exceeds_an_account_is_not_added(tmp_path: Path) -> None:
    store = await BatchStore.open(tmp_path)

    def refuse(account: Account, num_bytes: int) -> None:
        assert (account.num_files + account.num_batches, num_bytes) == (1, account.num_bytes)
        raise ValueError("too much")

    with pytest.raises(ValueError, match="too much"):
        await store.add_file(file("f"), refuse)
    with pytest.raises(ValueError, match="too much"):
        await store.add_batch(batch("b"), refuse)
    assert (await store.files("a", 9), await store.batches("a", 9)) == ([], [])
    assert await store.account("a") == Account()
    await store.close()


async def test_metadata_is_stored_as_it_is(tmp_path: Path) -> None:
    store = await BatchStore.open(tmp_path)
    await store.add_batch(batch("b"))
    [row] = await store._db.fetch_all("SELECT metadata FROM batches")
    assert len(row["metadata"].encode()) < 100
    assert await store.batch("b") == batch("b")
    await store.close()


async def test_frontends_open_at_the_same_time(tmp_path: Path) -> None:
    stores = await asyncio.gather(*(BatchStore.open(tmp_path) for _ in range(3)))
    for store in stores:
        await store.close()


async def test_requests_under_way_survive_the_process(tmp_path: Path) -> None:
    store = await BatchStore.open(tmp_path)
    await store.add_batch(batch("b"))
    for line in range(4):
        await store.begin_line("b", line, 1)
    await store.begin_line("b", 3, 2)
    await store.add_result("b", ResultRow(0, False, b"x"))
    await store.end_line("b", 1)
    await store.close()
    store = await BatchStore.open(tmp_path)
    assert await store.asked() == {("b", 2): 1, ("b", 3): 2}
    await store.end("b", "completed", 5, [])
    assert await store.asked() == {}
    await store.close()


async def test_another_process_reads_the_batches_of_all(tmp_path: Path) -> None:
    assert read_batches(tmp_path, 9, with_ended=True) == []
    assert list(tmp_path.iterdir()) == []
    store = await BatchStore.open(tmp_path)
    for name in "xyz":
        await store.add_batch(batch(name, owner=name))
    await store.end("y", "completed", 5, [])
    assert await store.change("x", "validating", waits_because="why", next_try_at=7)
    found = read_batches(tmp_path, 9, with_ended=False)
    assert [(one.id, one.owner, one.waits_because) for one in found] == [
        ("z", "z", ""),
        ("x", "x", "why"),
    ]
    assert len(read_batches(tmp_path, 9, with_ended=True)) == 3
    assert len(read_batches(tmp_path, 2, with_ended=True)) == 2
    await store.close()
    assert len(read_batches(tmp_path, 9, with_ended=True)) == 3


async def test_lists_and_accounts_use_an_index(tmp_path: Path) -> None:
    store = await BatchStore.open(tmp_path)
    await store.close()
    with closing(sqlite3.connect(tmp_path / BATCHES_NAME)) as connection:
        for query in (
            "SELECT * FROM files WHERE owner = 'a' ORDER BY created_at DESC, id DESC LIMIT 5",
            "SELECT * FROM batches WHERE owner = 'a' ORDER BY created_at, id LIMIT 5",
            "SELECT count(*) FROM batches WHERE owner = 'a' AND ended_at IS NULL",
            "SELECT num_bytes FROM accounts WHERE owner = 'a'",
        ):
            plan = " ".join(row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {query}"))
            assert "SEARCH" in plan
            assert "SCAN" not in plan
            assert "TEMP B-TREE" not in plan
