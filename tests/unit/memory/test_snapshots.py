"""Snapshots that go and come back beside the turn loop, on both kinds of device."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import AddressRange, Device
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PagePool
from gpupoold.memory.weights import Snapshots, WeightMemory
from gpupoold.wire.messages import SnapshotDropped, SnapshotTaken
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.rig import PAGE, pattern, until, write

NUM_PAGES = 16
WEIGHT_PAGES = 6
NAME = "images-under-test"


def emulated() -> Device:
    return EmulatedDevice(NUM_PAGES * PAGE, PAGE)


def cuda() -> Device:
    return CudaDevice(0, 0, 0, page_bytes=PAGE, driver=FakeCuda(NUM_PAGES * PAGE))


@pytest.fixture(params=[emulated, cuda], ids=["emulated", "cuda"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    opened: Device = request.param()
    yield opened
    opened.close()
    if isinstance(opened, CudaDevice):
        driver = opened._driver
        assert isinstance(driver, FakeCuda)
        assert driver.leaks == {}


class Bench:
    """A model's weights, a snapshot of theirs in a memfd of the "daemon", and what is told."""

    def __init__(self, device: Device) -> None:
        self.snapshots = Snapshots(device)
        self.pool = PagePool(NUM_PAGES)
        self.snapshot = HostBuffer.create(NAME, WEIGHT_PAGES * PAGE)
        write(self.snapshot.address, pattern("w", self.snapshot.num_bytes))
        address_range = AddressRange(device, self.pool, WEIGHT_PAGES)
        self.weights = WeightMemory(address_range, device, self.view())

    def view(self) -> HostBuffer:
        return HostBuffer(os.dup(self.snapshot.fd), self.snapshot.num_bytes)

    def fd(self, num_bytes: int = WEIGHT_PAGES * PAGE) -> int:
        if num_bytes == self.snapshot.num_bytes:
            return os.dup(self.snapshot.fd)
        other = os.memfd_create(NAME)
        os.ftruncate(other, num_bytes)
        return other

    def told(self, count: int = 1) -> list[SnapshotDropped | SnapshotTaken]:
        messages: list[SnapshotDropped | SnapshotTaken] = []
        deadline_s = time.monotonic() + 20
        while len(messages) < count:
            assert time.monotonic() < deadline_s, f"only {messages}"
            messages += self.snapshots.finished()
            time.sleep(0.001)
        assert not self.snapshots.is_busy
        return messages

    def num_views(self) -> int:
        """Mappings of snapshots in this process, but for the daemon's own."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return sum(NAME in line for line in lines) - 1

    def until_no_view_is_left(self) -> None:
        deadline_s = time.monotonic() + 20
        while self.num_views():
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        assert not self.weights.has_snapshot

    def close(self) -> None:
        self.snapshots.close()
        self.weights.close()
        until(lambda: self.num_views() == 0)
        self.snapshot.close()
        assert self.pool.num_free == NUM_PAGES


@pytest.fixture
def bench(device: Device) -> Iterator[Bench]:
    made = Bench(device)
    yield made
    made.close()


def test_an_snapshot_goes_and_comes_back(bench: Bench) -> None:
    bench.weights.load()
    bench.snapshots.drop("a", bench.weights)
    assert bench.snapshots.is_busy
    assert not bench.weights.has_snapshot  # at once: nothing may run from now on
    assert bench.pool.num_free == NUM_PAGES
    assert bench.told() == [SnapshotDropped("a")]
    assert bench.num_views() == 0
    bench.snapshots.take("a", bench.weights, bench.fd())
    assert bench.told() == [SnapshotTaken("a")]
    assert bench.weights.has_snapshot
    assert bench.num_views() == 1
    assert bench.weights.load() == WEIGHT_PAGES * PAGE


def test_there_is_nothing_to_drop(bench: Bench) -> None:
    bench.snapshots.drop("unknown", None)
    assert bench.told() == [SnapshotDropped("unknown")]
    for _ in range(2):
        bench.snapshots.drop("a", bench.weights)
        assert bench.told() == [SnapshotDropped("a")]


def test_an_snapshot_of_another_size_is_refused(bench: Bench) -> None:
    bench.snapshots.drop("a", bench.weights)
    bench.told()
    bench.snapshots.take("a", bench.weights, bench.fd(PAGE))
    [taken] = bench.told()
    assert isinstance(taken, SnapshotTaken)
    assert taken.problem == f"the snapshot has {PAGE} bytes, the weights have {WEIGHT_PAGES * PAGE}"
    assert (bench.weights.has_snapshot, bench.num_views()) == (False, 0)


def test_an_snapshot_replaces_another(bench: Bench) -> None:
    bench.snapshots.take("a", bench.weights, bench.fd())
    assert bench.told() == [SnapshotTaken("a")]
    assert bench.num_views() == 1


def test_a_model_that_is_gone_gets_no_snapshot(bench: Bench) -> None:
    bench.snapshots.drop("a", bench.weights)
    bench.snapshots.take("a", bench.weights, bench.fd())
    bench.snapshots.forget("a")
    bench.snapshots.forget("a")
    assert bench.told() == [SnapshotDropped("a")]
    bench.until_no_view_is_left()


def test_a_drop_overtakes_an_snapshot_on_its_way(bench: Bench) -> None:
    bench.snapshots.drop("a", bench.weights)
    bench.told()
    bench.snapshots.take("a", bench.weights, bench.fd())
    bench.snapshots.drop("a", bench.weights)
    assert bench.told() == [SnapshotDropped("a")]
    assert (bench.weights.has_snapshot, bench.num_views()) == (False, 0)


def test_a_snapshot_that_cannot_be_pinned_is_used_all_the_same() -> None:
    driver = FakeCuda(NUM_PAGES * PAGE)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    bench = Bench(device)
    bench.snapshots.drop("a", bench.weights)
    bench.told()
    driver.fail_at["register_host"] = driver.calls["register_host"] + 1
    bench.snapshots.take("a", bench.weights, bench.fd())
    assert bench.told() == [SnapshotTaken("a")]
    bench.weights.load()
    expected = pattern("w", WEIGHT_PAGES * PAGE)
    assert driver.kernel_read(bench.weights.address, WEIGHT_PAGES * PAGE) == expected
    bench.close()
    device.close()
