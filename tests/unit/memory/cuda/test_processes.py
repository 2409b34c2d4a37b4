"""Other users of a GPU, as NVML tells them."""

from __future__ import annotations

from types import SimpleNamespace

from gpupoold.memory.cuda.processes import num_processes


class Nvml:
    """NVML with some processes on one GPU."""

    class NVMLError(Exception):
        """As NVML's."""

    def __init__(self, computing: list[int], drawing: list[int], *, starts: bool = True) -> None:
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
        return [SimpleNamespace(pid=pid) for pid in self._pids["compute"]]

    def nvmlDeviceGetGraphicsRunningProcesses(self, _: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=pid) for pid in self._pids["graphics"]]


def test_a_process_that_computes_and_draws_counts_once() -> None:
    nvml = Nvml([7, 8], [8, 9])
    assert num_processes("0000:01:00.0", nvml) == 3
    assert nvml.num_open == 0


def test_a_gpu_or_driver_that_is_unknown_has_no_known_processes() -> None:
    nvml = Nvml([7], [])
    assert num_processes("", nvml) == 0
    assert nvml.num_open == 0
    assert num_processes("0000:01:00.0", Nvml([7], [], starts=False)) == 0
