"""Snapshots of one model on a single GPU and on a group of two: made, kept, evicted, restored."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpupool_state import History, Registry
from gpupoold.api.schemas import CachedModel
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.weights.cache import CacheFull, SnapshotId
from gpupoold.domain import Event
from gpupoold.scheduling.invariants import check_state
from gpupoold.wire import messages as m
from tests.unit.control.models.models_box import PAGE, TIMEOUT_S, ModelsBox, running

SINGLE, GROUP = SnapshotId("a", 1), SnapshotId("a", 2)
DEVICES = ("cuda:0", "cuda:1-2")


def box_of(
    tmp_path: Path, registry: Registry, history: History, num_snapshots: int = 1024
) -> ModelsBox:
    return ModelsBox(tmp_path, registry, history, num_snapshots, TIMEOUT_S, devices=DEVICES)


def files(box: ModelsBox) -> list[str]:
    folder = box.folder / "snapshots"
    return sorted(os.listdir(folder)) if folder.exists() else []


async def cached(box: ModelsBox, name: str) -> CachedModel:
    [found] = [one for one in (await box.cache_control.info()).models if one.name == name]
    return found


def serving(box: ModelsBox) -> set[int]:
    """The devices to which requests are sent."""
    return box.dispatcher.state.models["a"].hosts


async def test_each_degree_makes_one_snapshot_that_later_loads_use(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        assert sorted(box.told) == ["build a on 0", "build a on 1"]
        assert set(box.cache.snapshots) == {SINGLE, GROUP}
        await box.saved.stop()
        assert len(files(box)) == 2
        for number in (0, 1):
            box.told.clear()
            box.processes[number].end(-signal.SIGKILL)
            await box.until(lambda number=number: box.told == [f"attach a on {number}"])  # type: ignore[misc]
            await box.until_ready("a")
        found = await cached(box, "a")
        assert [(one.num_gpus, one.state, one.is_saved) for one in found.snapshots] == [
            (1, "host", True),
            (2, "host", True),
        ]
        assert (found.num_bytes, box.cache.used_bytes) == (2 * PAGE, 2 * PAGE)
        assert "snapshot_refused" not in await box.events()


async def test_a_restart_finds_the_files_of_both_and_a_removal_deletes_them(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a", "b") as box:
        await box.saved.stop()
    again = box_of(tmp_path, registry, history)
    again.fleet.restore(await registry.list())
    await again.start()
    try:
        await again.until_ready("a", "b")
        assert {one.split()[0] for one in again.told} == {"attach"}
        assert len(files(again)) == 4
        await again.lifecycle.remove("a", "refuse")
        assert len(files(again)) == 2
        assert {one.model for one in again.cache.snapshots} == {"b"}
    finally:
        await again.stop()


async def test_files_of_a_degree_stay_while_its_worker_is_down(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        await box.saved.stop()
    again = box_of(tmp_path, registry, history)
    again.broken.add(1)
    again.fleet.restore(await registry.list())
    await again.start()
    try:
        await again.until(lambda: again.supervisor.workers[0].has_loaded)
        assert again.told == ["attach a on 0"]
        assert len(files(again)) == 2
    finally:
        await again.stop()


async def test_without_room_for_both_the_unused_one_goes_and_its_device_rests(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        box.told.clear()
        box.cache.touch("a", degree=2)
        box.cache.budget_bytes = PAGE
        box.snapshots.host_budget.shrink()
        await box.until(lambda: box.told == ["drop a on 0"])
        assert set(box.cache.snapshots) == {GROUP}
        assert serving(box) == {1}
        assert box.fleet.is_warm("a")
        box.ask("a", "r1")
        await box.until(lambda: box.requests.get(1) == ["r1"])
        [rests] = [one for one in await history_of(box) if one.kind == "device_rests"]
        assert "device 0: no requests for lack of host memory" in rests.message
        assert "the model cache of 4 KiB has no room for all snapshots" in rests.message
        # The snapshot in use stays.
        with pytest.raises(CacheFull), box.snapshots.host_budget.holding(SINGLE):
            await box.snapshots.host_budget.reserve(SINGLE, PAGE)
        found = await cached(box, "a")
        assert [one.state for one in found.snapshots] == ["disk", "host"]


async def history_of(box: ModelsBox) -> list[Event]:
    await box.history.flush()
    return await box.history.events_after(0, 1000)


async def let_single_gpu_rest(box: ModelsBox) -> None:
    """Make the cache so small that only the group, which was used last, keeps its snapshot."""
    box.cache.touch("a", degree=2)
    box.cache.budget_bytes = PAGE
    box.snapshots.host_budget.shrink()
    await box.until(lambda: serving(box) == {1})


async def test_a_resting_device_serves_again_when_there_is_room(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        await let_single_gpu_rest(box)
        box.ask("a", "r1")
        box.told.clear()
        box.cache.budget_bytes = 2 * PAGE
        box.ask("a", "r2")
        await box.until(lambda: serving(box) == {0, 1})
        assert "take a on 0" in box.told
        assert box.dispatcher.live.num_waiting("a") == 0


async def test_requests_of_a_lost_device_go_on_on_the_resting_one(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        await let_single_gpu_rest(box)
        box.ask("a", "r1")
        await box.until(lambda: box.requests.get(1) == ["r1"])
        box.broken.add(1)
        box.processes[1].end(-signal.SIGKILL)
        await box.until(lambda: box.requests.get(0) == ["r1"])
        assert serving(box) == {0}
        assert set(box.cache.snapshots) == {SINGLE}


async def test_a_model_with_room_for_one_snapshot_is_warmed_on_one_degree(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        await box.snapshots.host_budget.drop("a")
        assert not box.fleet.is_warm("a")
        box.cache.budget_bytes = PAGE
        box.ask("a", "r1")
        await box.until(lambda: box.fleet.is_warm("a"))
        [present] = box.cache.snapshots
        [number] = serving(box)
        assert box.fleet.snapshots.of("a", number) == present
        await box.until(lambda: box.requests.get(number) == ["r1"])
        assert "device_rests" in await box.events()
        check_state(box.dispatcher.state)


async def test_other_options_make_both_snapshots_anew(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        await box.saved.stop()
        before = files(box)
        await box.lifecycle.set("a", SetModelRequest(engine={"quantization": "fp8"}))
        await box.saved.stop()
        assert set(box.cache.snapshots) == {SINGLE, GROUP}
        assert len(set(files(box)) - set(before)) == 2


async def test_damaged_weights_are_made_again_on_both(
    tmp_path: Path, registry: Registry, history: History
) -> None:
    async with running(box_of(tmp_path, registry, history), "a") as box:
        box.told.clear()
        worker = box.supervisor.workers[0]
        box.dispatcher.from_worker(worker, m.WrongAnswer("a", (1,), (2,)))
        await box.until(lambda: box.fleet.is_warm("a") and len(box.told) == 4)
        assert [one for one in box.told if one.startswith("build")] == [
            "build a on 0",
            "build a on 1",
        ]
