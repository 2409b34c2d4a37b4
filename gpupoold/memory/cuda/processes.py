"""Processes that use a GPU, and their memory, from NVML."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import pynvml


class GpuUse(NamedTuple):
    """The use of a GPU: the number of processes, and the memory of this process in bytes.

    ``own_bytes`` is None if NVML does not list this process, or not its memory.
    """

    num_processes: int = 0
    own_bytes: int | None = None


def gpu_use(pci_bus_id: str, nvml: Any = pynvml) -> GpuUse:
    """Return the use of a GPU by processes that compute or draw; 0 processes if it is unknown.

    NVML counts this process too. Inside a container the identifiers are those of the host, or the
    processes are hidden. NVML does not list memory by process under WSL.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return GpuUse()
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        found = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
    except nvml.NVMLError:
        return GpuUse()
    finally:
        nvml.nvmlShutdown()
    own = [process.usedGpuMemory for process in found if process.pid == os.getpid()]
    return GpuUse(len({process.pid for process in found}), own[0] if own else None)
