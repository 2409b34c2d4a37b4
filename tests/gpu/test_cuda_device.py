"""``CudaDevice`` on a real GPU: what the fake driver can only assume."""

from __future__ import annotations

import ctypes

import pytest

from gpupoold.memory.bandwidth import measure_link
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import AddressRange
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import num_nodes
from gpupoold.memory.pages import PagePool, PageRun
from tests.gpu.conftest import NUM_PAGES, PAGE
from tests.gpu.rig import HAS_KERNELS

pytestmark = pytest.mark.gpu


def read(device: CudaDevice, address: int, num_bytes: int) -> bytes:
    target = ctypes.create_string_buffer(num_bytes)
    device.copy_out(ctypes.addressof(target), address, num_bytes)
    device.synchronize()
    return target.raw


def test_a_address_range_has_the_snapshots_bytes_on_whichever_pages(
    device: CudaDevice, snapshot: HostBuffer
) -> None:
    pool = PagePool(device.num_pages)
    address_range = AddressRange(device, pool, NUM_PAGES // 2)
    expected = ctypes.string_at(snapshot.address, snapshot.num_bytes)
    for hole in (0, 3, 17):
        held = pool.allocate(hole)
        address_range.retain(range(address_range.num_pages), snapshot.address)
        device.synchronize()
        assert read(device, address_range.address, snapshot.num_bytes) == expected
        address_range.drop(range(address_range.num_pages))
        pool.free(held)
    address_range.close()


def test_fresh_pages_are_zero(device: CudaDevice, snapshot: HostBuffer) -> None:
    address = device.reserve(4)
    device.map_and_fill(address, [PageRun(0, 4)], snapshot.address)
    device.unmap(address, [PageRun(0, 4)])
    device.map_and_fill(address, [PageRun(2, 2), PageRun(0, 2)], None)
    device.synchronize()
    assert read(device, address, 4 * PAGE) == bytes(4 * PAGE)
    device.unmap(address, [PageRun(2, 2), PageRun(0, 2)])
    device.release(address, 4)


def test_mapped_bytes_can_be_zeroed(device: CudaDevice, snapshot: HostBuffer) -> None:
    address = device.reserve(2)
    device.map_and_fill(address, [PageRun(0, 2)], snapshot.address)
    device.synchronize()
    device.zero(address + 5, PAGE)
    device.zero(address, 0)
    device.synchronize()
    found = read(device, address, 2 * PAGE)
    assert found[5 : 5 + PAGE] == bytes(PAGE)
    assert found[:5] == ctypes.string_at(snapshot.address, 5)
    device.unmap(address, [PageRun(0, 2)])
    device.release(address, 2)


def test_the_node_is_one_of_the_machines(device: CudaDevice) -> None:
    [node] = device.rank_nodes
    assert node in range(-1, max(1, num_nodes()))


def test_the_link_is_as_fast_as_any_that_gpus_have(device: CudaDevice) -> None:
    link = measure_link(device, PagePool(device.num_pages))
    for bytes_per_s in (link.in_bytes_per_s, link.out_bytes_per_s):
        assert 1e9 < bytes_per_s < 1e12


def test_one_page_can_be_behind_many_addresses(device: CudaDevice, snapshot: HostBuffer) -> None:
    runs = [PageRun(5, 1)] * (4 * NUM_PAGES)
    address = device.reserve(len(runs))
    device.map(address, runs)
    device.copy_in(address + (len(runs) - 1) * PAGE, snapshot.address, PAGE)
    device.synchronize()
    assert read(device, address, PAGE) == ctypes.string_at(snapshot.address, PAGE)
    device.unmap(address, runs)
    device.release(address, len(runs))


def test_lent_memory_can_be_used_and_comes_back(device: CudaDevice) -> None:
    runs = [PageRun(8, 64)]
    before_bytes = device.free_bytes()
    device.release_memory(runs)
    assert device.free_bytes() >= before_bytes + 60 * PAGE
    device.reclaim(runs)
    assert abs(device.free_bytes() - before_bytes) <= 4 * PAGE


def test_nothing_is_kept_after_close() -> None:
    CudaDevice(0, NUM_PAGES * PAGE, 0, PAGE).close()  # the context and its modules stay
    outer = CudaDevice(0, PAGE, 0, PAGE)
    before_bytes = outer.free_bytes()
    for _ in range(3):
        CudaDevice(0, NUM_PAGES * PAGE, 0, PAGE).close()
    assert outer.free_bytes() >= before_bytes - 4 * PAGE
    outer.close()


class TestWithTorch:
    """Torch computes on our pages, in the same context."""

    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        torch = pytest.importorskip("torch", reason="the engine is not installed")
        if not torch.cuda.is_available():
            pytest.skip("the installed torch has no CUDA")

    def test_tensors_are_made_before_their_pages(
        self, device: CudaDevice, snapshot: HostBuffer
    ) -> None:
        from gpupoold.worker.weights import tensors

        address = device.reserve(2)
        tensor = tensors.over(device, address, 2 * PAGE)
        assert tensor.is_cuda
        device.map_and_fill(address, [PageRun(0, 2)], snapshot.address)
        device.synchronize()
        assert tensor.cpu().numpy().tobytes() == ctypes.string_at(snapshot.address, 2 * PAGE)
        device.unmap(address, [PageRun(0, 2)])
        device.release(address, 2)

    @pytest.mark.skipif(not HAS_KERNELS, reason="the fake card computes nothing")
    def test_a_graph_replays_after_its_pages_were_exchanged(self) -> None:
        """Kernels wait for zeros; pages go only when kernels have ended."""
        import torch

        from gpupoold.worker.device import compute_streams
        from gpupoold.worker.weights import tensors

        device = CudaDevice(0, 8 * PAGE, 0, PAGE, compute_streams=compute_streams)
        address = device.reserve(1)
        device.map_and_fill(address, [PageRun(0, 1)], None)
        tensor = tensors.over(device, address, PAGE)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            tensor.add_(1)
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            for page in range(3):
                device.unmap(address, [PageRun(page, 1)])
                device.map_and_fill(address, [PageRun(page + 1, 1)], None)
                graph.replay()
                graph.replay()
            assert int(tensor.min()) == int(tensor.max()) == 2
        device.unmap(address, [PageRun(3, 1)])
        device.release(address, 1)
        device.close()
