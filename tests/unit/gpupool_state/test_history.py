"""The history in good times: written in the background, read back, bounded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gpupool_state import Database, History, HistoryLimits, RequestRow
from gpupoold.domain import DeviceId, FinishReason, ModelName, Switch

pytestmark = pytest.mark.asyncio


def request(number: int, model: str = "llama", arrived_at: float | None = None) -> RequestRow:
    return RequestRow(
        request_id=f"r{number}",
        model=ModelName(model),
        device=DeviceId(0),
        arrived_at=float(number) if arrived_at is None else arrived_at,
        ttft_s=0.5,
        tbt_p50_s=0.01,
        tbt_p99_s=0.02,
        tbt_max_s=0.03,
        num_prompt_tokens=100,
        num_output_tokens=10,
        num_tokens_in_time=9,
        finish_reason=FinishReason.STOP,
        total_s=1.5,
    )


def switch(number: int) -> Switch:
    return Switch(
        at=float(number),
        device=DeviceId(1),
        model=ModelName("llama"),
        previous=ModelName("qwen") if number % 2 else None,
        total_s=0.6,
        evict_s=0.1,
        map_s=0.1,
        weights_s=0.3,
        kv_s=0.1,
        weight_bytes=16 << 30,
        kv_in_bytes=1 << 20,
        kv_out_bytes=2 << 20,
    )


@pytest_asyncio.fixture
async def history(db: Database) -> AsyncIterator[History]:
    kept = History(db, flush_interval_s=60)
    await kept.start()
    yield kept
    await kept.stop()


async def test_rows_come_back_as_they_went_in(history: History) -> None:
    times: dict[str, Any] = {
        "ttft_s": None,
        "tbt_p50_s": None,
        "tbt_p99_s": None,
        "tbt_max_s": None,
    }
    aborted = dataclasses.replace(request(9, "qwen"), device=None, **times)
    history.record_request(request(1))
    history.record_request(aborted)
    history.record_switch(switch(1))
    history.record_switch(switch(2))
    assert await history.flush()
    assert await history.recent_requests() == [aborted, request(1)]
    assert await history.recent_switches() == [switch(2), switch(1)]
    assert history.dropped_rows == 0


async def test_requests_are_filtered_and_limited(history: History) -> None:
    for number in range(6):
        history.record_request(request(number, "llama" if number % 2 else "qwen"))
    await history.flush()

    async def ids(model: str | None = None, since: float | None = None, limit: int = 9) -> str:
        rows = await history.recent_requests(model, since, limit)
        return " ".join(row.request_id for row in rows)

    assert await ids() == "r5 r4 r3 r2 r1 r0"
    assert await ids(model="llama") == "r5 r3 r1"
    assert await ids(since=3.0) == "r5 r4 r3"
    assert await ids(model="qwen", since=2.0) == "r4 r2"
    assert await ids(limit=2) == "r5 r4"
    assert await ids(limit=-1) == ""
    assert await ids(model="nobody") == ""


async def test_last_requests(history: History) -> None:
    assert await history.last_requests() == {}
    for number, model in enumerate(("qwen", "llama", "qwen", "llama", "phi")):
        history.record_request(request(number, model, arrived_at=100.0 - number))
    await history.flush()
    assert await history.last_requests() == {"qwen": 100.0, "llama": 99.0, "phi": 96.0}


async def test_the_task_writes_by_itself(db: Database) -> None:
    history = History(db, flush_interval_s=0.01)
    await history.start()
    for number in range(3):
        history.record_request(request(number))
        async with asyncio.timeout(5):
            while len(await history.recent_requests()) <= number:
                await asyncio.sleep(0.005)
    await history.stop()


async def test_stop_writes_what_is_left(path: Path) -> None:
    async with await Database.open(path) as db:
        history = History(db, flush_interval_s=60)
        await history.start()
        history.record_request(request(1))
        await asyncio.wait_for(history.stop(), 5)
        await history.stop()
        history.record_request(request(2))
        assert history.dropped_rows == 1, "nobody would write it any more"
    async with await Database.open(path) as db:
        again = History(db)
        await again.start()
        assert await again.recent_requests() == [request(1)]
        again.record_request(request(3))
        await again.stop()
        assert await again.recent_requests() == [request(3), request(1)]


async def test_recording_needs_a_start_and_there_is_one(db: Database) -> None:
    history = History(db)
    for record in (
        lambda: history.record_request(request(1)),
        lambda: history.record_event("info", "model_added", "s", "m"),
    ):
        with pytest.raises(RuntimeError, match="has not been started"):
            record()
    await history.stop()
    await history.start()
    with pytest.raises(RuntimeError, match="started before"):
        await history.start()
    await history.stop()


@pytest.mark.parametrize("limit", [1, 7, 50])
async def test_tables_stay_within_their_limits_oldest_first(db: Database, limit: int) -> None:
    limits = HistoryLimits(max_requests=limit, max_switches=limit, max_events=limit)
    history = History(db, limits, flush_interval_s=60)
    await history.start()
    for number in range(1, 201):
        history.record_request(request(number))
        history.record_switch(switch(number))
        history.record_event("info", "model_added", "subject", str(number))
        if number % 9 == 0:
            await history.flush()
            counts = [
                (await db.fetch_all(f"SELECT count(*) FROM {table}"))[0][0]
                for table in ("requests", "switches", "events")
            ]
            assert max(counts) <= limit
            assert min(counts) >= min(number, limit - limit // 10 - 8, 1)
    await history.stop()
    rows = await history.recent_requests(limit=1000)
    assert [row.request_id for row in rows] == [f"r{200 - age}" for age in range(len(rows))]
    assert limit * 0.8 <= len(rows) <= limit
    assert history.dropped_rows == 0


async def test_a_lowered_limit_takes_effect(path: Path) -> None:
    for limit in (5000, 100):
        async with await Database.open(path) as db:
            history = History(db, HistoryLimits(max_requests=limit))
            await history.start()
            for number in range(3000):
                history.record_request(request(number))
            await history.stop()
            assert len(await history.recent_requests(limit=10_000)) <= limit


async def test_limits_may_change_meanwhile(db: Database, history: History) -> None:
    for number in range(20):
        history.record_request(request(number))
        history.record_event("info", "model_added", "subject", str(number))
    await history.flush()
    history.keep(HistoryLimits(max_requests=5, max_events=7))
    await history.flush()
    assert [row.request_id for row in await history.recent_requests()] == [
        f"r{number}" for number in range(19, 14, -1)
    ]
    [(num_events,)] = await db.fetch_all("SELECT count(*) FROM events")
    assert num_events == 7


async def test_recording_costs_microseconds(history: History) -> None:
    clock = asyncio.get_running_loop().time
    row = request(1)
    start = clock()
    for _ in range(5000):
        history.record_request(row)
    assert (clock() - start) / 5000 < 100e-6
