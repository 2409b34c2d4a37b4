"""Other users of a GPU, as NVML tells them."""

from __future__ import annotations

import os
from types import SimpleNamespace

from gpupoold.system.nvml import GpuUse, gpu_use


class Nvml:
    """NVML with some processes on one GPU."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(
        self,
        computing: list[int],
        drawing: list[int],
        *,
        starts: bool = True,
        num_bytes: int | None = None,
    ) -> None:
        self._num_bytes = num_bytes
        self._pids = {"compute": computing, "graphics": drawing}
        self._starts = starts
        self.num_open = 0

    def nvmlInit(self) -> None:
        if not self._starts:
            raise self.NVMLError
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByPciBusId(self, pci_bus_id: str) -> str:
        if pci_bus_id != "0000:01:00.0":
            raise self.NVMLError
        return pci_bus_id

    def nvmlDeviceGetComputeRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return self._processes("compute")

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return self._processes("graphics")

    def _processes(self, kind: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid, usedGpuMemory=self._num_bytes) for pid in self._pids[kind]]


def test_a_process_that_computes_and_draws_counts_once() -> None:
    nvml = Nvml([7, 8], [8, 9])
    assert gpu_use("0000:01:00.0", nvml) == GpuUse(3)
    assert nvml.num_open == 0


def test_a_gpu_or_driver_that_is_unknown_has_no_known_processes() -> None:
    nvml = Nvml([7], [])
    assert gpu_use("", nvml) == GpuUse()
    assert nvml.num_open == 0
    assert gpu_use("0000:01:00.0", Nvml([7], [], starts=False)) == GpuUse()


def test_the_own_memory_is_known_where_nvml_lists_it() -> None:
    nvml = Nvml([os.getpid(), 8], [9], num_bytes=1000)
    assert gpu_use("0000:01:00.0", nvml) == GpuUse(3, 1000)
    assert gpu_use("0000:01:00.0", Nvml([os.getpid()], [])) == GpuUse(1)
