"""Room for snapshots: who goes, who waits, what is refused, and that bytes are counted once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.control.weights.cache import (
    CacheFull,
    CacheSetting,
    HostMemoryBudget,
    SnapshotCache,
    SnapshotId,
    Space,
)
from gpupoold.errors import Refused, TimedOut

MIB = 1 << 20
A, C = SnapshotId("a"), SnapshotId("c")


class Bench:
    """A cache of 4 MiB; workers let snapshots go while ``gate`` is open."""

    def __init__(self) -> None:
        self.cache = SnapshotCache(4 * MIB)
        self.in_use: set[SnapshotId] = set()
        self.gate = asyncio.Event()
        self.gate.set()
        self.gone: list[str] = []
        self.error: Exception | None = None
        self.host_budget = HostMemoryBudget(self.cache, self.in_use.__contains__, self._release)

    async def _release(self, of: SnapshotId) -> None:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        self.gone.append(str(of))

    @property
    def present(self) -> list[str]:
        return sorted(map(str, self.cache.snapshots))

    def put(self, model: str, mib: int, at: float = 0.0) -> None:
        fd = os.memfd_create("snapshot")
        os.ftruncate(fd, mib * MIB)
        self.cache.put(SnapshotId(model), fd, "d")
        self.cache.touch(model, at)

    async def bring(self, model: str, mib: int) -> None:
        with self.host_budget.holding(SnapshotId(model)):
            await self.host_budget.reserve(SnapshotId(model), mib * MIB)
            assert self.cache.used_bytes <= self.cache.budget_bytes
            self.put(model, mib)

    def end(self, model: str) -> None:
        """The model has no requests any more."""
        self.in_use.discard(SnapshotId(model))
        self.host_budget.changed()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.cache.close()


async def soon(task: asyncio.Task[None]) -> bool:
    """Return whether a task ends without anything else happening."""
    for _ in range(20):
        await asyncio.sleep(0)
    return task.done()


async def test_the_least_recently_used_makes_room(bench: Bench) -> None:
    bench.put("a", 2, at=2.0)
    bench.put("b", 2, at=1.0)
    await bench.bring("c", 2)
    assert bench.gone == ["b"]
    assert bench.present == ["a", "c"]
    assert bench.cache.used_bytes == 4 * MIB


async def test_nothing_goes_while_there_is_room(bench: Bench) -> None:
    bench.put("a", 2)
    await bench.bring("b", 2)
    await bench.bring("a", 2)  # has its place already
    assert bench.gone == []


async def test_room_that_is_not_used_is_given_up(bench: Bench) -> None:
    with bench.host_budget.holding(A):
        with bench.host_budget.holding(A):
            await bench.host_budget.reserve(A, 3 * MIB)
        assert bench.cache.used_bytes == 3 * MIB
    assert bench.cache.used_bytes == 0


async def test_pinned_snapshots_stay(bench: Bench) -> None:
    bench.put("a", 2)
    bench.cache.pinned.add("a")
    assert bench.host_budget.space(C, 3 * MIB) is Space.NEVER
    with pytest.raises(
        Refused, match=r"c: a snapshot of 3 MiB does not fit .* of 4 MiB, where 2 MiB are pinned"
    ) as caught:
        await bench.bring("c", 3)
    assert caught.value.hint == (
        "unpin a model (`gpupool cache unpin`), or set memory.model_cache to 5MiB or more in "
        "/etc/gpupool/gpupool.toml, then run `gpupool reload`"
    )
    with pytest.raises(Refused):
        bench.host_budget.check(C, 3 * MIB)
    await bench.bring("c", 2)
    assert bench.present == ["a", "c"]


async def test_an_snapshot_larger_than_the_cache(bench: Bench) -> None:
    bench.put("a", 2)
    with pytest.raises(
        Refused, match="c: a snapshot of 5 MiB does not fit in the model cache of 4"
    ):
        await bench.bring("c", 5)
    assert bench.gone == []


async def test_a_worked_out_cache_is_refused_with_the_arithmetic(bench: Bench) -> None:
    file, why = Path("/etc/g.toml"), "9 MiB of host memory less: system 5 MiB"
    setting = CacheSetting(file, why, most_bytes=6 * MIB)
    budget = HostMemoryBudget(
        bench.cache, bench.in_use.__contains__, bench._release, lambda: setting
    )
    with pytest.raises(CacheFull) as caught:
        budget.check(C, 5 * MIB)
    assert caught.value.message == (
        f"c: a snapshot of 5 MiB does not fit in the model cache of 4 MiB ({why})"
    )
    assert "set memory.model_cache to 5MiB or more in /etc/g.toml" in caught.value.hint
    with pytest.raises(CacheFull) as caught:
        budget.check(C, 7 * MIB)
    assert "memory.model_cache can have 6 MiB at most" in caught.value.hint


async def test_a_check_tells_what_evictions_would_free(bench: Bench) -> None:
    bench.put("a", 1, at=1.0)
    bench.put("b", 2, at=2.0)
    assert bench.host_budget.check(C, MIB) == 0
    assert bench.host_budget.check(C, 2 * MIB) == MIB
    assert bench.host_budget.check(C, 4 * MIB) == 3 * MIB
    assert bench.gone == []


async def test_without_patience_busy_snapshots_are_in_the_way(bench: Bench) -> None:
    bench.put("a", 2)
    bench.put("b", 1)
    bench.in_use.add(A)
    with pytest.raises(Refused, match="of 4 MiB, where 2 MiB in use"):
        await bench.bring("c", 3)
    with pytest.raises(Refused):
        bench.host_budget.check(C, 3 * MIB)
    bench.host_budget.check(C, 2 * MIB)
    assert bench.gone == []


def test_space_is_fact_until_it_changes(bench: Bench) -> None:
    change = bench.host_budget.change
    assert bench.host_budget.space(C, 2 * MIB) is Space.FITS
    bench.put("a", 3)
    assert bench.host_budget.space(C, 2 * MIB) is Space.EVICTS
    bench.in_use.add(A)
    assert bench.host_budget.space(C, 2 * MIB) is Space.LATER
    assert bench.host_budget.space(C, MIB) is Space.FITS
    assert not change.is_set()
    bench.end("a")
    assert change.is_set()
    assert bench.host_budget.space(C, 2 * MIB) is Space.EVICTS
    bench.cache.pinned.add("a")
    assert bench.host_budget.space(C, 2 * MIB) is Space.NEVER


def test_a_wait_in_vain_has_a_reason(bench: Bench) -> None:
    bench.put("a", 4)
    bench.in_use.add(A)
    error = bench.host_budget.why_full(C, 2 * MIB, 0.02)
    assert isinstance(error, TimedOut)
    assert "c: no memory for a snapshot of 2 MiB became free" in error.message
    assert "within 0.02 s" in error.message
    assert "memory.model_cache" in error.hint
    assert isinstance(bench.host_budget.why_full(C, 2 * MIB), CacheFull)
    assert isinstance(bench.host_budget.why_full(C, 5 * MIB, 0.02), CacheFull)


async def test_held_snapshots_stay(bench: Bench) -> None:
    bench.put("a", 4)
    with bench.host_budget.holding(A), pytest.raises(CacheFull):
        await bench.bring("c", 2)
    await bench.bring("c", 2)
    assert bench.gone == ["a"]


async def test_two_that_want_the_same_bytes(bench: Bench) -> None:
    bench.put("a", 2, at=1.0)
    bench.put("b", 2, at=2.0)
    bench.gate.clear()
    tasks = [asyncio.create_task(bench.bring(name, 1)) for name in ("c", "d")]
    assert not await soon(tasks[0])
    bench.gate.set()
    await asyncio.gather(*tasks)
    assert bench.gone == ["a"]
    assert bench.present == ["b", "c", "d"]


async def test_who_gives_up_leaves_the_books_right(bench: Bench) -> None:
    bench.put("a", 4)
    bench.gate.clear()
    task = asyncio.create_task(bench.bring("c", 2))
    assert not await soon(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.cache.get(A) is None  # workers were told
    assert bench.cache.used_bytes == 4 * MIB  # and have not answered
    again = asyncio.create_task(bench.bring("a", 4))
    assert not await soon(again)
    bench.gate.set()
    await again
    assert bench.gone == ["a"]
    assert bench.cache.used_bytes == 4 * MIB


async def test_a_worker_that_does_not_answer(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    bench.put("a", 4)
    bench.error = TimedOut("worker 0 did not answer")
    await bench.bring("c", 2)
    assert bench.present == ["c"]
    assert "a: the snapshot may still take memory: worker 0" in caplog.text


class TestDrop:
    async def test_it_goes(self, bench: Bench) -> None:
        bench.put("a", 2)
        await bench.host_budget.drop("a")
        await bench.host_budget.drop("a")
        assert (bench.gone, bench.cache.used_bytes) == (["a"], 0)

    async def test_pinned_busy_and_held_ones_do_not(self, bench: Bench) -> None:
        bench.put("a", 2)
        bench.cache.pinned.add("a")
        with pytest.raises(Refused, match="a is pinned") as caught:
            await bench.host_budget.drop("a")
        assert caught.value.hint == "run `gpupool cache unpin a` first"
        bench.cache.pinned.clear()
        bench.in_use.add(A)
        with pytest.raises(Refused, match="a has live requests"):
            await bench.host_budget.drop("a")
        bench.in_use.clear()
        with bench.host_budget.holding(A), pytest.raises(Refused, match="a is being loaded"):
            await bench.host_budget.drop("a")
        assert bench.cache.get(A) is not None


async def test_a_smaller_cache_lets_idle_snapshots_go_at_once_and_others_later(
    bench: Bench,
) -> None:
    bench.put("a", 1, at=1.0)
    bench.put("b", 1, at=2.0)
    bench.put("c", 2, at=3.0)
    bench.in_use.add(C)
    bench.cache.budget_bytes = MIB
    bench.host_budget.shrink()
    bench.host_budget.shrink()  # one that is under way is enough
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.gone == ["a", "b"]
    assert bench.present == ["c"]
    bench.end("c")
    for _ in range(50):
        await asyncio.sleep(0)
    assert bench.gone == ["a", "b", "c"]
    assert bench.cache.used_bytes == 0


async def test_a_smaller_cache_that_all_fit_in_changes_nothing(bench: Bench) -> None:
    bench.put("a", 1)
    bench.put("b", 1)
    bench.cache.budget_bytes = 2 * MIB
    bench.host_budget.shrink()
    await bench.host_budget.stop()
    assert bench.gone == []


async def test_shrinking_ends_with_the_daemon(bench: Bench) -> None:
    bench.put("a", 2)
    bench.cache.pinned.add("a")
    bench.cache.budget_bytes = MIB
    bench.host_budget.shrink()
    for _ in range(20):
        await asyncio.sleep(0)
    await bench.host_budget.stop()
    assert bench.present == ["a"]
