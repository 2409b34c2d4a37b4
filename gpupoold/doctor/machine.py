"""The facts about this machine from which budgets are worked out."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from gpupoold.config.device_names import visible_entry
from gpupoold.config.machine import DeviceFacts, Machine
from gpupoold.config.schema import DeviceSettings, Settings
from gpupoold.doctor.facts import Gpu, GpuFacts, MemoryFacts
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_memory import memory_facts
from gpupoold.latency.hardware import hardware
from gpupoold.memory import numa

# GPUs do not change while a process runs, and a driver may be slow to answer.
_gpus: list[GpuFacts] = []


def find_machine(settings: Settings) -> Machine:
    """Return the facts about this machine, or about the simulated host of the settings."""
    gpu = GpuFacts()
    if any(device.kind == "cuda" for device in settings.devices):
        if not _gpus or _gpus[0].problem:
            _gpus[:] = [gpu_facts()]
        gpu = _gpus[0]
    return machine_of(settings, memory_facts(), gpu, numa.node_bytes())


def machine_of(
    settings: Settings,
    memory: MemoryFacts,
    gpu: GpuFacts,
    node_bytes: Mapping[int, int],
    environment: Mapping[str, str] = os.environ,
) -> Machine:
    """Return the facts for the devices of the settings. Pure.

    ``environment`` determines the visible GPUs. The settings of a simulated host replace the facts
    about host memory.
    """
    host = settings.simulated_host
    if host.memory_bytes is not None:
        num_nodes, count = host.numa_nodes, len(settings.devices)
        return Machine(
            host.memory_bytes,
            tuple(
                _device(one, gpu, environment, number * num_nodes // count)
                for number, one in enumerate(settings.devices)
            ),
            node_bytes=dict.fromkeys(range(num_nodes), host.memory_bytes // num_nodes),
            is_simulated=True,
        )
    return Machine(
        memory.total_bytes - memory.huge_bytes,
        tuple(_device(one, gpu, environment) for one in settings.devices),
        memory.limit_bytes,
        node_bytes,
    )


def _device(
    device: DeviceSettings,
    gpu: GpuFacts,
    environment: Mapping[str, str],
    node: int | None = None,
) -> DeviceFacts:
    if device.kind == "emulated":
        return DeviceFacts("emulated", device.memory_bytes)
    if device.kind == "sim":
        has_bytes: int | None = hardware(device.gpu or "").memory_bytes
    else:
        found = _gpu(gpu, visible_entry(device.index or 0, environment))
        has_bytes, node = (found.memory_bytes, found.node) if found else (None, None)
    sizes = [one for one in (has_bytes, device.memory_bytes) if one is not None]
    return DeviceFacts(device.kind, min(sizes, default=None), node)


def _gpu(gpu: GpuFacts, entry: str | None) -> Gpu | None:
    """Return the GPU of an entry of ``CUDA_VISIBLE_DEVICES``."""
    if entry is not None and entry.isdecimal():
        with suppress(IndexError):
            return gpu.gpus[int(entry)]
    return next((one for one in gpu.gpus if entry and one.uuid.startswith(entry)), None)
