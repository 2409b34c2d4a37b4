"""The driver's view of device memory against ours."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from vllm.platforms import current_platform

from gpupoold.errors import Failed
from gpupoold.memory.emulated import EmulatedDevice
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
    memory = DriverMemory(gpu, lambda: torch_bytes[0], count_processes=lambda _: processes[0])
    before = memory.outside_pages()
    gpu.free, torch_bytes[0], processes[0] = 1 * GIB, 2 * GIB, 2
    assert memory.check() == {}
    assert memory.taken_since(before).device_bytes == GIB
    processes[0] = 1
    assert memory.taken_since(before).device_bytes == 9 * GIB
    assert memory.freed_since(memory.outside_pages()).device_bytes == 0


def test_a_gpu_is_not_opened_where_streams_do_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.cpu.shm", ModuleType("shm"))
    with pytest.raises(Failed, match="torch has no CUDA streams"):
        open_device("cuda", 1 << 30, 0, 0)
