"""What is saved of which model, within the budget, and what goes when a model goes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.control.weights.cache import CachedSnapshot, SnapshotId
from gpupoold.control.weights.kept_snapshots import SavedSnapshots, SnapshotKeys
from gpupoold.domain import DeviceFacts, ModelName
from gpupoold.memory.libc import NO_NODE, create_memfd
from gpupoold.wire.messages import ModelToLoad, WorkerReady
from tests.unit.descriptors import open_descriptors, opened_since

READY = WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0", "emulated")
SIZE = 8192
A, B, C = SnapshotId("a"), SnapshotId("b"), SnapshotId("c")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def snapshot() -> Iterator[CachedSnapshot]:
    fd = create_memfd("test", SIZE)
    os.pwrite(fd, b"weights", 0)
    yield CachedSnapshot(fd, SIZE, "layout", (1, 2, 3))
    os.close(fd)


def model(name: str, path: Path) -> ModelToLoad:
    return ModelToLoad(name=ModelName(name), source="a", path=str(path))


async def keep(
    snapshots: SavedSnapshots, name: str, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    assert await snapshots.look_up(model(name, checkpoint), READY) is None
    assert await snapshots.read(SnapshotId(name), [NO_NODE]) is None
    snapshots.keep(SnapshotId(name), snapshot)
    await snapshots.stop()


async def test_what_is_kept_is_found(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    again = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    assert await again.look_up(model("b", checkpoint), READY) == SIZE
    assert (await again.sizes(), await again.used_bytes()) == ({B: SIZE}, SIZE)
    found = await again.read(B, [NO_NODE])
    assert found is not None
    assert (found.num_bytes, found.layout_digest, found.self_check) == (SIZE, "layout", (1, 2, 3))
    assert os.pread(found.fd, 7, 0) == b"weights"
    os.close(found.fd)


async def test_a_reader_that_leaves_leaves_no_memory(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    before = open_descriptors()
    reading = asyncio.create_task(snapshots.read(A, [NO_NODE]))
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    async with asyncio.timeout(20):
        while opened_since(before) or len(asyncio.all_tasks()) > 1:
            await asyncio.sleep(0.005)


async def test_nothing_is_kept_without_a_budget(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 0, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    assert not (tmp_path / "snapshots").exists()
    assert (await snapshots.sizes(), await snapshots.used_bytes()) == ({}, 0)


async def test_the_budget_is_for_all_together(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", SIZE + 1, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    other = tmp_path / "other"
    other.mkdir()
    await keep(snapshots, "b", other, snapshot)
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    assert "b: a snapshot of 8 KiB is not saved" in caplog.text


async def test_a_file_goes_with_the_last_model_that_has_it(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    assert await snapshots.look_up(model("b", checkpoint), READY) == SIZE
    assert await snapshots.sizes() == {A: SIZE, B: SIZE}
    await snapshots.forget("a")
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    await snapshots.forget("b")
    await snapshots.forget("b")
    assert not list((tmp_path / "snapshots").iterdir())


async def test_a_file_goes_when_its_checkpoint_has_changed(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    await keep(
        SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys()), "a", checkpoint, snapshot
    )
    (checkpoint / "config.json").write_text('{"changed": true}')
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await keep(snapshots, "a", checkpoint, snapshot)
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    await snapshots.tidy([A, SnapshotId("not looked for yet")])
    assert len(list((tmp_path / "snapshots").iterdir())) == 2
    await snapshots.tidy([A])
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    assert await snapshots.look_up(model("a", checkpoint), READY) == SIZE


async def test_a_checkpoint_that_is_not_there_has_no_snapshot(
    tmp_path: Path, snapshot: CachedSnapshot, caplog: pytest.LogCaptureFixture
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await keep(snapshots, "a", tmp_path / "nowhere", snapshot)
    assert "cannot read the checkpoint" in caplog.text
    assert not (tmp_path / "snapshots").exists()


async def test_settled_is_after_saving(
    tmp_path: Path, checkpoint: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    await snapshots.settled(A)
    await snapshots.look_up(model("a", checkpoint), READY)
    before = open_descriptors()
    for _ in range(3):
        snapshots.keep(A, snapshot)
    assert len(opened_since(before)) == 3
    await snapshots.settled(A)
    assert await snapshots.sizes() == {A: SIZE}
    assert not opened_since(before)  # no descriptor keeps the memory


async def test_a_smaller_budget_deletes_what_was_used_least_recently(
    tmp_path: Path, snapshot: CachedSnapshot
) -> None:
    snapshots = SavedSnapshots(tmp_path / "snapshots", 1 << 20, SnapshotKeys())
    for name in ("a", "b", "c"):
        folder = tmp_path / name
        folder.mkdir()
        await keep(snapshots, name, folder, snapshot)
    snapshots.budget_bytes = 2 * SIZE
    snapshots.shrink({A: 2.0, B: 1.0, C: 3.0}.__getitem__)
    await snapshots.stop()
    assert await snapshots.sizes() == {A: SIZE, C: SIZE}
    snapshots.budget_bytes = 0
    snapshots.shrink({A: 2.0, B: 0.0, C: 0.0}.__getitem__)
    await snapshots.stop()
    assert not list((tmp_path / "snapshots").iterdir())
