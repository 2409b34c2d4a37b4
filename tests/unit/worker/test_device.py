"""The driver's view of device memory against ours."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from vllm.platforms import current_platform

from gpupoold.errors import Failed
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.system.nvml import GpuUse
from gpupoold.worker.device import DriverMemory, open_device

GIB = 1 << 30


class Gpu(EmulatedDevice):
    """An emulated device that says how much the driver has free."""

    free = 10 * GIB

    def free_bytes(self) -> int | None:
        return self.free


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(1 << 20, 1 << 16)


def test_what_torch_takes_is_accounted_for(gpu: Gpu) -> None:
    torch_bytes = [GIB]
    memory = DriverMemory(gpu, lambda: torch_bytes[0])
    gpu.free, torch_bytes[0] = 4 * GIB, 7 * GIB
    assert memory.check() == {"unaccounted_bytes": 0}
    gpu.free -= 100
    assert memory.check() == {"unaccounted_bytes": 100}


def test_memory_that_nobody_has_is_a_leak(gpu: Gpu) -> None:
    memory = DriverMemory(gpu, lambda: 0)
    gpu.free -= 2 * GIB
    with pytest.raises(AssertionError, match="2 GiB of device memory is in use"):
        memory.check()


def test_emulated_devices_have_no_driver() -> None:
    device = EmulatedDevice(1 << 20, 1 << 16)
    assert DriverMemory(device).check() == {}


def test_what_others_take_of_a_shared_gpu_is_no_leak(gpu: Gpu) -> None:
    memory = DriverMemory(gpu, lambda: 0, has_gpu_alone=False)
    gpu.free -= 2 * GIB
    assert memory.check() == {}


def test_other_processes_on_the_gpu_are_not_charged_to_an_engine(gpu: Gpu) -> None:
    """Their memory comes and goes; torch's allocations are this process's own."""
    torch_bytes, processes = [GIB], [1]
    memory = DriverMemory(gpu, lambda: torch_bytes[0], use_of=lambda _: GpuUse(processes[0]))
    before = memory.outside_pages()
    gpu.free, torch_bytes[0], processes[0] = 1 * GIB, 2 * GIB, 2
    assert memory.check() == {}
    graphs_bytes = 150 << 20
    assert memory.taken_since(before).device_bytes == GIB + graphs_bytes
    processes[0] = 1
    assert memory.taken_since(before).device_bytes == 9 * GIB
    assert memory.freed_since(memory.outside_pages()).device_bytes == 0


def test_pinned_tables_are_host_memory_of_an_engine(gpu: Gpu) -> None:
    pinned_bytes = [GIB]
    memory = DriverMemory(gpu, lambda: 0, pinned_bytes=lambda: pinned_bytes[0])
    before = memory.outside_pages()
    pinned_bytes[0] += 128 << 30
    assert memory.taken_since(before).host_bytes >= 127 << 30


def test_an_engine_is_charged_with_its_graphs_beside_other_processes(gpu: Gpu) -> None:
    """As on a GPU whose other processes draw a desktop, or are a second worker."""
    own_bytes = [3 * GIB]
    memory = DriverMemory(
        gpu, lambda: GIB, has_gpu_alone=False, use_of=lambda _: GpuUse(5, own_bytes[0])
    )
    before = memory.outside_pages()
    gpu.free, own_bytes[0] = GIB, 3 * GIB + 700
    assert memory.taken_since(before).device_bytes == 700
    assert memory.check() == {"unaccounted_bytes": 700}


def test_memory_is_compared_within_one_source(gpu: Gpu) -> None:
    """NVML may fail at one of two moments."""
    own_bytes: list[int | None] = [3 * GIB, None, None, 3 * GIB]
    memory = DriverMemory(gpu, lambda: 0, use_of=lambda _: GpuUse(1, own_bytes.pop(0)))
    before = memory.outside_pages()
    gpu.free -= 300
    assert memory.taken_since(before).device_bytes == 300
    assert memory.freed_since(before).device_bytes == 0


def test_a_gpu_is_not_opened_where_streams_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu.shm", ModuleType("shm"))
    with pytest.raises(Failed, match="torch has no CUDA streams"):
        open_device("cuda", 1 << 30, 0, 0)
