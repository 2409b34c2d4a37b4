"""The history when the disk fails: serving is never told, losses are counted."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing

import pytest
import pytest_asyncio

from gpupool_state import Database, History, RequestRow
from gpupoold.domain import DeviceId, FinishReason

pytestmark = pytest.mark.asyncio

Act = Callable[[], Awaitable[None]]
ROW = RequestRow(
    *("r", "llama", 1.0, 1.0, 1.0, 1, 1, 1, FinishReason.STOP, 1.0),
    device=DeviceId(0),
    tbt_p50_s=1.0,
    tbt_max_s=1.0,
)


def request(number: int, padding: int = 0) -> RequestRow:
    return dataclasses.replace(ROW, request_id=f"{number}:{'x' * padding}", arrived_at=number)


@pytest_asyncio.fixture
async def history(db: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[History]:
    monkeypatch.setattr("gpupool_state.history.NUM_BUFFERED_ROWS", 20)
    kept = History(db, flush_interval_s=60)
    await kept.start()
    yield kept
    await kept.stop()


async def numbers(history: History) -> list[int]:
    rows = await history.recent_requests(limit=1000)
    return sorted(int(row.request_id.split(":")[0]) for row in rows)


async def messages(history: History) -> list[str]:
    return [event.message for event in await history.events_after(0)]


async def test_a_full_buffer_drops_the_oldest_and_counts(history: History) -> None:
    for number in range(50):
        history.record_request(request(number))
    assert history.dropped_rows == 30
    await history.flush()
    assert await numbers(history) == list(range(30, 50))


async def test_rows_wait_for_a_full_disk(history: History, fill_disk: Act, free_disk: Act) -> None:
    await fill_disk()
    for number in range(10):
        history.record_request(request(number, padding=9000))
    for _ in range(3):
        assert not await history.flush()
    assert history.dropped_rows == 0
    assert await numbers(history) == []
    (told,) = await messages(history)
    assert "no space left" in told, "one event, not one per try"
    await free_disk()
    assert await history.flush()
    assert await numbers(history) == list(range(10))
    assert "written again; 0 rows were lost" in (await messages(history))[-1]


async def test_a_disk_that_stays_full_costs_rows_not_memory(
    history: History, fill_disk: Act
) -> None:
    await fill_disk()
    for number in range(100):
        history.record_request(request(number, padding=9000))
        if number % 10 == 0:
            assert not await history.flush()
    # 100 requests and the event that tells of the failure, of which 20 wait.
    assert history.dropped_rows == 81
    await history.stop()
    assert history.dropped_rows == 101


async def test_the_task_tries_again_by_itself(db: Database) -> None:
    history = History(db, flush_interval_s=0.01)
    await history.start()
    with closing(sqlite3.connect(db.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        history.record_request(request(1))
        assert await history.wait_event(0, 5), "the failure is an event"
    assert await history.wait_event(1, 5), "and so is its end"
    assert await numbers(history) == [1]
    assert history.dropped_rows == 0
    await history.stop()


@pytest.mark.parametrize(
    "change", [{"request_id": "\udcff"}, {"num_prompt_tokens": 1 << 70}, {"total_s": float("nan")}]
)
async def test_a_row_that_cannot_be_kept_costs_only_itself(
    history: History, change: dict[str, object]
) -> None:
    history.record_request(request(1))
    history.record_request(dataclasses.replace(ROW, **change))  # type: ignore[arg-type]
    history.record_request(request(2))
    assert await history.flush()
    assert await numbers(history) == [1, 2]
    assert history.dropped_rows == 1


async def test_a_cancelled_flush_loses_and_doubles_nothing(history: History) -> None:
    for number in range(15):
        history.record_request(request(number))
        task = asyncio.create_task(history.flush())
        await asyncio.sleep(number * 0.0002)
        task.cancel()
        await asyncio.wait([task])
    assert await history.flush()
    assert await numbers(history) == list(range(15))
    assert history.dropped_rows == 0


async def test_a_closed_database_does_not_reach_the_recorder(db: Database) -> None:
    history = History(db, flush_interval_s=0.01)
    await history.start()
    await db.close()
    history.record_request(request(1))
    assert await history.wait_event(0, 5)
    await history.stop()
    assert history.dropped_rows == 2, "the request and the event"
