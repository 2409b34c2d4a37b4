"""Processes that use a GPU, from NVML."""

from __future__ import annotations

from typing import Any

import pynvml


def num_processes(pci_bus_id: str, nvml: Any = pynvml) -> int:
    """Return the number of processes that compute or draw on a GPU; 0 if it is unknown.

    NVML counts this process too. Inside a container the identifiers are those of the host, or the
    processes are hidden.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return 0
    try:
        handle = nvml.nvmlDeviceGetHandleByPciBusId(pci_bus_id)
        found = [
            *nvml.nvmlDeviceGetComputeRunningProcesses(handle),
            *nvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
        ]
        return len({process.pid for process in found})
    except nvml.NVMLError:
        return 0
    finally:
        nvml.nvmlShutdown()
