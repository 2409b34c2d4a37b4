"""Events: numbered at once, followed without polling, kept across restarts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import Database, History
from gpupoold.domain import Event

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def history(db: Database, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[History]:
    monkeypatch.setattr("gpupool_state.history.NUM_EVENTS_IN_MEMORY", 5)
    kept = History(db, flush_interval_s=60, now=lambda: 7.0)
    await kept.start()
    yield kept
    await kept.stop()


def record(history: History, count: int = 1) -> None:
    for _ in range(count):
        history.record_event("info", "model_added", "llama", f"number {history.last_event_id + 1}")


async def ids(history: History, after_id: int, limit: int = 100) -> list[int]:
    return [event.id for event in await history.events_after(after_id, limit)]


async def test_an_event_is_in_the_log_with_its_kind(
    history: History, caplog: pytest.LogCaptureFixture
) -> None:
    history.record_event("warning", "worker_down", "0", "restarted")
    [log] = [one for one in caplog.records if one.name == "gpupoold.events"]
    assert (log.levelname, log.getMessage()) == ("WARNING", "worker_down 0: restarted")
    fields = vars(log)
    assert (fields["event_kind"], fields["event_subject"]) == ("worker_down", "0")
    assert log.filename == "test_events.py"  # who has recorded it


async def test_an_event_is_there_at_once(history: History) -> None:
    event = history.record_event("warning", "worker_down", "0", "restarted")
    assert event == Event(1, 7.0, "warning", "worker_down", "0", "restarted")
    assert await history.events_after(0) == [event]
    assert await history.events_after(1) == []
    assert history.last_event_id == 1


async def test_events_are_the_same_from_memory_and_disk(history: History) -> None:
    record(history, 3)
    before = await history.events_after(0)
    await history.flush()
    record(history, 6)
    assert (await history.events_after(0))[:3] == before


async def test_memory_and_disk_join_without_gap_or_double(history: History) -> None:
    record(history, 8)
    await history.flush()
    record(history, 4)  # memory holds 8..12, the disk 1..8
    for after_id in range(13):
        assert await ids(history, after_id) == list(range(after_id + 1, 13))
    assert await ids(history, 5, limit=4) == [6, 7, 8, 9]
    assert await ids(history, 0, limit=0) == []


async def test_numbers_go_on_after_a_restart(path: Path) -> None:
    for number in range(3):
        async with await Database.open(path) as db:
            history = History(db)
            await history.start()
            assert history.last_event_id == 2 * number
            record(history, 2)
            await history.stop()
            assert await ids(history, 0) == list(range(1, 2 * number + 3))


async def test_a_follower_sees_events_on_a_full_disk(
    history: History, fill_disk: Callable[[], Awaitable[None]]
) -> None:
    await fill_disk()
    seen: list[int] = []

    async def follow() -> None:
        while len(seen) < 6 and await history.wait_event(seen[-1] if seen else 0, 5):
            seen.extend(await ids(history, seen[-1] if seen else 0))

    task = asyncio.create_task(follow())
    for _ in range(3):
        history.record_event("info", "model_added", "s", "x" * 5000)
        await asyncio.sleep(0)
    assert not await history.flush()  # adds an event of its own
    record(history, 2)
    await asyncio.wait_for(task, 5)
    assert seen == [1, 2, 3, 4, 5, 6]


async def test_every_follower_wakes(history: History) -> None:
    waiting = [asyncio.create_task(history.wait_event(0, 5)) for _ in range(5)]
    waiting.append(asyncio.create_task(history.wait_event(1, 5)))
    await asyncio.sleep(0)
    record(history, 1)
    assert await asyncio.gather(*waiting[:5]) == [True] * 5
    assert not waiting[5].done()
    record(history, 1)
    assert await waiting[5]


async def test_waiting_ends_without_events(history: History) -> None:
    assert not await history.wait_event(0, 0.01)
    record(history, 1)
    assert await history.wait_event(0, 0)


async def test_stop_lets_followers_go(db: Database) -> None:
    history = History(db)
    await history.start()
    waiting = asyncio.create_task(history.wait_event(0, 60))
    await asyncio.sleep(0)
    await history.stop()
    assert not await asyncio.wait_for(waiting, 5)
