"""Minutes of attainment: ended by the clock, kept, known again after a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from gpupool_state import DATABASE_NAME, Database, History
from gpupoold.control.accounting.model_stats import Minutes, ModelStats, minutes_of
from gpupoold.domain import FinishReason
from gpupoold.durations import Lateness, RequestStages
from tests.unit.control.live import live_request

pytestmark = pytest.mark.asyncio
AT = 1_700_000_040  # a minute begins


class Clock:
    def __init__(self) -> None:
        self.at = float(AT)

    def __call__(self) -> float:
        return self.at


class Bench:
    """The minutes of one daemon after another on one database."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.clock = Clock()
        self.begin()

    def begin(self) -> None:
        self.stats: dict[str, ModelStats] = {}
        self.minutes = Minutes(self.history, self.stats, self.clock)

    def serve(self, model: str, ttft_s: float, num_tokens: int = 1) -> None:
        stats = self.stats.setdefault(model, ModelStats())
        stats.now.requests += 1
        live = live_request("r", model)
        stats.add_tokens(live, [1] * num_tokens, ttft_s)
        stats.end(FinishReason.STOP)

    def tick(self, seconds: float) -> None:
        self.clock.at += seconds
        self.minutes.tick(self.clock.at - AT)

    async def kept(
        self, since: float = 0.0, model: str | None = None
    ) -> list[tuple[str, int, int]]:
        await self.history.flush()
        parts = self.history.minutes(since, model, num_at_once=2)
        rows = [row async for part in parts for row in part]
        return [(row.model, row.minute_at - AT, row.tokens) for row in rows]


@pytest_asyncio.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with await Database.open(tmp_path / DATABASE_NAME) as db:
        history = History(db, flush_interval_s=60)
        await history.start()
        yield Bench(history)
        await history.stop()


async def test_a_minute_is_kept_when_it_is_over(bench: Bench) -> None:
    bench.serve("a", 0.5, num_tokens=3)
    bench.serve("b", 2.0)
    bench.tick(59.5)
    assert await bench.kept() == []
    bench.tick(0.5)
    assert await bench.kept() == [("a", 0, 3), ("b", 0, 1)]
    bench.serve("a", 0.5)
    bench.tick(60.0)
    assert await bench.kept() == [("a", 0, 3), ("b", 0, 1), ("a", 60, 1)]
    assert bench.stats["a"].attainment_minutes()[-3:] == [1.0, 1.0, None]


async def test_what_is_kept_of_it(bench: Bench) -> None:
    bench.serve("a", 0.5, num_tokens=3)
    bench.serve("a", 2.0)
    now = bench.stats["a"].now
    now.lateness = Lateness(0.1, 0.2, 0.3, 0.4)
    now.first_token = RequestStages(1.0, 2.0, 3.0, 4.0, 5.0)
    now.between_tokens = RequestStages(6.0, 7.0, 8.0, 9.0, 10.0)
    before = bench.stats["a"].last_hour()
    bench.tick(60.0)
    await bench.history.flush()
    [rows] = [part async for part in bench.history.minutes(0.0)]
    assert minutes_of(rows) == {"a": {AT: before}}


async def test_minutes_are_found_by_model_and_time(bench: Bench) -> None:
    for _ in range(3):
        bench.serve("a", 0.5)
        bench.serve("b", 0.5)
        bench.tick(60.0)
    assert await bench.kept(model="b") == [("b", 0, 1), ("b", 60, 1), ("b", 120, 1)]
    assert await bench.kept(since=AT + 60.0, model="a") == [("a", 60, 1), ("a", 120, 1)]
    assert await bench.kept(since=AT + 150.0) == [("a", 120, 1), ("b", 120, 1)]
    assert await bench.kept(since=AT + 180.0) == []


async def test_a_restart_goes_on_with_the_hour(bench: Bench) -> None:
    bench.serve("old", 0.5)
    bench.tick(60.0)
    bench.tick(3000.0)
    bench.serve("a", 0.5)
    bench.serve("a", 2.0)
    bench.tick(60.0)
    bench.serve("a", 2.0)
    bench.minutes.close()
    await bench.history.flush()
    bench.begin()
    await bench.minutes.restore()
    assert bench.stats["a"].attainment_minutes()[-3:] == [None, 0.5, None]
    assert bench.stats["a"].last_hour().tokens == 2, "not the minute under way, which is not over"
    bench.serve("a", 0.5)
    bench.tick(60.0)
    assert await bench.kept(model="a") == [("a", 3060, 2), ("a", 3120, 1), ("a", 3120, 1)]
    bench.tick(540.0)
    bench.begin()
    await bench.minutes.restore()
    assert "old" not in bench.stats, "it was more than an hour ago"
    assert bench.stats["a"].attainment_minutes()[48:51] == [0.5, 0.5, None]


async def test_a_clock_that_jumps(bench: Bench) -> None:
    bench.serve("a", 0.5)
    bench.tick(30 * 60.0)
    assert bench.stats["a"].attainment_minutes()[29:31] == [1.0, None]
    bench.serve("a", 2.0)
    bench.tick(-45 * 60.0)
    assert await bench.kept() == [("a", 0, 1), ("a", 1800, 1)]
    assert bench.stats["a"].attainment_minutes()[-2:] == [0.0, None]


async def test_a_damaged_row_does_not_keep_the_daemon_from_starting(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.serve("a", 0.5)
    bench.tick(60.0)
    await bench.history.flush()
    async with bench.history._db.write() as tx:
        await tx.execute("UPDATE slo_minutes SET ttft = 'x'")
    bench.begin()
    await bench.minutes.restore()
    assert bench.stats == {}
    assert "cannot be read: not a histogram" in caplog.text
