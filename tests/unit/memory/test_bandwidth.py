"""The link's measurement: real copies on an emulated device, and what it asks of a fake GPU."""

from __future__ import annotations

import pytest

from gpupoold.memory import bandwidth, libc
from gpupoold.memory.bandwidth import (
    LinkBandwidth,
    measure_far_share,
    measure_fill,
    measure_link,
)
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import Copy, Direction
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.pages import OutOfPages, PagePool
from tests.unit.memory.cuda_rig import NUM_PAGES, PAGE
from tests.unit.memory.fake_cuda import FakeCuda


def test_an_emulated_device_has_a_speed_and_keeps_nothing() -> None:
    device = EmulatedDevice(4 << 20, 64 << 10)
    pool = PagePool(device.num_pages)
    link = measure_link(device, pool)
    # Slower than any memory that works, faster than any there is: what units can get wrong.
    assert 1e6 < link.in_bytes_per_s < 1e13
    assert 1e6 < link.out_bytes_per_s < 1e13
    assert pool.num_free == pool.num_pages
    pool.check_integrity()
    device.close()


def test_a_gpu_is_measured_with_copy_streams_in_batches_that_overlap(
    device: CudaDevice, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "copy_batch_bytes", 4 * PAGE)
    pool = PagePool(NUM_PAGES)
    assert isinstance(measure_link(device, pool, 10 * PAGE), LinkBandwidth)
    copies = [(call, size) for call, _, size in driver.log if call in ("copy_in", "copy_out")]
    one_try = [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert copies == [("copy_in", n) for n in one_try * 3] + [("copy_out", n) for n in one_try * 3]
    assert driver.calls["synchronize_event"] == 6, "one wait per try, behind its last batch"
    assert pool.num_free == NUM_PAGES


def test_as_many_pages_as_there_are(device: CudaDevice, driver: FakeCuda) -> None:
    pool = PagePool(NUM_PAGES)
    held = pool.allocate(NUM_PAGES - 2)
    measure_link(device, pool)
    assert {size for call, _, size in driver.log if call == "copy_in"} == {2 * PAGE}
    pool.free(held)
    held = pool.allocate(NUM_PAGES)
    with pytest.raises(OutOfPages):
        measure_link(device, pool)
    pool.free(held)


@pytest.mark.parametrize(
    ("direct", "staged", "share"), [(40.0, 30.0, 0.8), (20.0, 30.0, 0.6), (55.0, 60.0, 1.0)]
)
def test_far_memory_is_copied_the_faster_way(
    device: CudaDevice,
    monkeypatch: pytest.MonkeyPatch,
    direct: float,
    staged: float,
    share: float,
) -> None:
    nodes, rates = list[int](), {True: direct, False: staged}
    monkeypatch.setattr(bandwidth, "node_bytes", lambda: {0: 1 << 30, 1: 1 << 30})
    monkeypatch.setattr(libc, "prefer_node", lambda at, size, node: nodes.append(node))

    def best_of(device: CudaDevice, direction: Direction, whole: Copy) -> float:
        [part, *_] = device.pinned.split(whole.source, whole.num_bytes)
        return rates[part.is_pinned]

    monkeypatch.setattr(bandwidth, "_best_of", best_of)
    device.rank_nodes = (1,)
    assert measure_far_share(device, PagePool(NUM_PAGES), LinkBandwidth(50.0, 50.0)) == share
    assert nodes == [0, 0]
    assert device.pinned.stages_far is (staged > direct)


@pytest.mark.parametrize("nodes", [{}, {0: 1 << 30}])
def test_there_is_no_far_memory(
    device: CudaDevice, monkeypatch: pytest.MonkeyPatch, nodes: dict[int, int]
) -> None:
    monkeypatch.setattr(bandwidth, "node_bytes", lambda: nodes)
    device.rank_nodes = (0,)
    assert measure_far_share(device, PagePool(NUM_PAGES), LinkBandwidth(50.0, 50.0)) == 1.0


def test_a_failure_gives_everything_back(device: CudaDevice, driver: FakeCuda) -> None:
    """``device`` checks that nothing is left."""
    pool = PagePool(NUM_PAGES)
    driver.fail_at["copy_out"] = 1
    with pytest.raises(RuntimeError, match="copy_out failed"):
        measure_link(device, pool)
    assert driver.registrations == {}
    assert pool.num_free == NUM_PAGES


def test_the_best_try_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = iter([4.0, 1.0, 2.0])
    monkeypatch.setattr(bandwidth, "_try_s", lambda copy_stream, batches: next(tries))
    device = EmulatedDevice(PAGE, PAGE)
    assert bandwidth._best_of(device, Direction.IN, Copy(0, 0, 1000)) == 1000
    device.close()


def test_filling_is_measured_with_pieces_that_overlap_their_mapping(
    device: CudaDevice, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a switch: a single piece would be copied after its mapping."""
    monkeypatch.setattr(CudaDevice, "piece_bytes", 4 * PAGE)
    device._pages_per_piece = 4
    pool = PagePool(NUM_PAGES)
    assert measure_fill(device, pool) > 0
    calls = [call for call, _, _ in driver.log if call in ("copy_in", "allow_access")]
    one_try = ["allow_access", "copy_in"] * 2
    assert calls[-len(3 * one_try) :] == 3 * one_try
    assert {size for call, _, size in driver.log if call == "copy_in"} == {4 * PAGE}
