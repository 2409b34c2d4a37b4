"""Snapshots that a service manager keeps: which come back, and which are let go."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from gpupoold.control.weights.cache import SnapshotCache, SnapshotId
from gpupoold.control.weights.kept_snapshots import Label, SnapshotKeys, StoredSnapshots, _sealed
from gpupoold.domain import DeviceFacts, ModelName
from gpupoold.memory.libc import create_memfd
from gpupoold.system.systemd import FdStore, NamedFd, Notifier
from gpupoold.wire.messages import ModelToLoad, WorkerReady
from tests.service_manager import FakeManager
from tests.unit.descriptors import open_descriptors, opened_since

READY = WorkerReady(DeviceFacts(1 << 30, 4096, 1e9), "0.32.0", "emulated")
SIZE = 8192


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[FakeManager]:
    with FakeManager(tmp_path) as running:
        yield running


@pytest.fixture
def model(tmp_path: Path) -> ModelToLoad:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return ModelToLoad(name=ModelName("a"), source="a", path=str(folder))


class Daemon:
    """The parts of one run that snapshots are about; the manager outlives it."""

    def __init__(self, manager: FakeManager, budget_bytes: int = 10 * SIZE) -> None:
        # As at a start: what was handed over is this process's own.
        stored = [NamedFd(os.dup(fd), name) for name, fds in manager.stored.items() for fd in fds]
        self.keys = SnapshotKeys()
        self.stored_snapshots = StoredSnapshots(
            FdStore(Notifier(manager.address), stored), self.keys
        )
        self.cache = SnapshotCache(budget_bytes, self.stored_snapshots)

    async def put(self, model: ModelToLoad, data: bytes = b"weights") -> None:
        await self.keys.note(model, READY)
        fd = create_memfd("snapshot", SIZE)
        os.pwrite(fd, data, 0)
        self.cache.put(SnapshotId(model.name), fd, "layout", (1, 2))

    async def restore(self, *models: ModelToLoad) -> dict[str, bytes]:
        await self.stored_snapshots.restore(models, READY, self.cache)
        return {of.model: os.pread(one.fd, 7, 0) for of, one in self.cache.snapshots.items()}

    def end(self) -> None:
        self.cache.close()


async def store_one(manager: FakeManager, model: ModelToLoad) -> None:
    daemon = Daemon(manager)
    await daemon.put(model)
    manager.wait_for("FDSTORE")
    daemon.end()
    assert len(manager.stored) == 1


async def test_an_snapshot_outlives_daemons(manager: FakeManager, model: ModelToLoad) -> None:
    await store_one(manager, model)
    for _ in range(2):
        daemon = Daemon(manager)
        assert await daemon.restore(model) == {"a": b"weights"}
        snapshot = daemon.cache.get(SnapshotId("a"))
        assert snapshot is not None
        assert (snapshot.num_bytes, snapshot.digest, snapshot.self_check) == (
            SIZE,
            "layout",
            (1, 2),
        )
        daemon.end()
    assert len(manager.values("FDSTORE")) == 1  # it is there and need not be given again


@pytest.mark.parametrize("how", ["drop", "retire", "replace"])
async def test_what_leaves_the_cache_is_not_kept(
    manager: FakeManager, model: ModelToLoad, how: str
) -> None:
    await store_one(manager, model)
    [before] = manager.stored
    daemon = Daemon(manager)
    await daemon.restore(model)
    if how == "replace":
        await daemon.put(model, b"other")
        manager.wait_for("FDSTORE", 2)
        assert before not in manager.stored
        assert len(manager.stored) == 1
    else:
        leave = daemon.cache.drop if how == "drop" else daemon.cache.retire
        leave(SnapshotId("a"))
        manager.wait_for("FDSTOREREMOVE")
        assert manager.stored == {}
    daemon.end()


async def refused(manager: FakeManager, *models: ModelToLoad, budget_bytes: int = SIZE) -> bool:
    """Return whether a new daemon takes nothing and has the manager let everything go."""
    daemon = Daemon(manager, budget_bytes)
    taken = await daemon.restore(*models)
    manager.wait_for("FDSTOREREMOVE")
    return not taken and not manager.stored


async def test_a_checkpoint_that_has_changed(manager: FakeManager, model: ModelToLoad) -> None:
    await store_one(manager, model)
    Path(model.path, "config.json").write_text('{"changed": true}')
    assert await refused(manager, model)


async def test_a_model_that_is_gone(manager: FakeManager, model: ModelToLoad) -> None:
    await store_one(manager, model)
    other = dataclasses.replace(model, name=ModelName("b"))
    assert await refused(manager, other)


async def test_a_budget_that_has_shrunk(manager: FakeManager, model: ModelToLoad) -> None:
    await store_one(manager, model)
    assert await refused(manager, model, budget_bytes=SIZE - 1)


async def test_the_budget_is_for_the_first(manager: FakeManager, model: ModelToLoad) -> None:
    other = dataclasses.replace(model, name=ModelName("b"))
    daemon = Daemon(manager)
    await daemon.put(model, b"first..")
    await daemon.put(other, b"second.")
    manager.wait_for("FDSTORE", 2)
    daemon.end()
    daemon = Daemon(manager, SIZE)
    assert await daemon.restore(other, model) == {"b": b"second."}
    manager.wait_for("FDSTOREREMOVE")
    assert len(manager.stored) == 1
    daemon.end()


def label(**changes: object) -> bytes:
    fields = {"model": "a", "key": "k", "num_bytes": SIZE, "digest": "d", "self_check": ()}
    return msgspec.json.encode(msgspec.convert(fields | changes, Label))


def loose() -> int:
    fd = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, SIZE)
    return fd


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: [create_memfd("i", SIZE)], "1 snapshots and 0 labels in 1 descriptors"),
        (lambda: [_sealed(label())], "0 snapshots and 1 labels"),
        (lambda: [loose(), _sealed(label())], "0 snapshots and 1 labels in 2"),
        (lambda: [create_memfd("i", SIZE), _sealed(b"{")], "invalid label"),
        (lambda: [create_memfd("i", SIZE), _sealed(label(format=9))], "has format 9"),
        (lambda: [create_memfd("i", 4096), _sealed(label())], "4096 bytes instead of 8192"),
        (lambda: [os.open("/dev/null", os.O_RDONLY)], "Invalid argument"),
    ],
    ids=[
        "no label",
        "no snapshot",
        "not sealed",
        "no JSON",
        "other format",
        "other size",
        "no memfd",
    ],
)
async def test_what_is_no_snapshot_is_let_go(
    manager: FakeManager, caplog: pytest.LogCaptureFixture, make: object, why: str
) -> None:
    assert callable(make)
    fds = make()
    FdStore(Notifier(manager.address)).keep("snapshot-1", fds)
    manager.wait_for("FDSTORE")
    for fd in fds:
        os.close(fd)
    before = open_descriptors()
    daemon = Daemon(manager)
    manager.wait_for("FDSTOREREMOVE")
    assert manager.stored == {}
    assert "snapshot-1: the snapshot stored by systemd is not used" in caplog.text
    assert why in caplog.text
    assert await daemon.restore() == {}
    assert not opened_since(before)
    assert len(before.items() - open_descriptors().items()) >= len(fds)


async def test_nothing_is_kept_without_a_manager(model: ModelToLoad) -> None:
    keys = SnapshotKeys()
    cache = SnapshotCache(SIZE, StoredSnapshots(FdStore(Notifier()), keys))
    await keys.note(model, READY)
    cache.put(SnapshotId("a"), create_memfd("snapshot", SIZE), "layout")
    cache.drop(SnapshotId("a"))
    assert cache.used_bytes == 0


async def test_a_snapshot_of_another_degree_waits_for_its_worker(
    manager: FakeManager, model: ModelToLoad
) -> None:
    ready = msgspec.structs.replace(READY, device_name="2 x CPU")
    daemon = Daemon(manager)
    await daemon.put(model)
    await daemon.keys.note(model, ready, 2)
    daemon.cache.put(SnapshotId("a", 2), create_memfd("snapshot", SIZE), "layout of two")
    manager.wait_for("FDSTORE", 2)
    daemon.end()
    daemon = Daemon(manager)
    await daemon.stored_snapshots.restore([model], READY, daemon.cache, 1, later={2})
    assert list(daemon.cache.snapshots) == [SnapshotId("a")]
    assert len(manager.stored) == 2
    await daemon.stored_snapshots.restore([model], ready, daemon.cache, 2, later={1})
    found = daemon.cache.get(SnapshotId("a", 2))
    assert found is not None
    assert found.digest == "layout of two"
    daemon.end()
    daemon = Daemon(manager)  # the box has no group any more
    assert await daemon.restore(model) == {"a": b"weights"}
    manager.wait_for("FDSTOREREMOVE")
    assert len(manager.stored) == 1
    daemon.end()
