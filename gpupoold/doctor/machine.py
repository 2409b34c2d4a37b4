"""The facts about this machine from which budgets are worked out."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

from gpupoold.config.machine import Machine, MachineDevice, visible_entry
from gpupoold.config.schema import Settings
from gpupoold.config.sections import DeviceSettings
from gpupoold.doctor.facts import GpuFacts, MemoryFacts
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_host import memory_facts
from gpupoold.engine_versions import installed_version, is_built_for_gpus
from gpupoold.latency.shape import hardware
from gpupoold.memory import libc

# GPUs do not change while a process runs, and a driver may be slow to answer.
_gpus: list[GpuFacts] = []


def find_machine(settings: Settings) -> Machine:
    """Return the facts about this machine, or about the simulated host of the settings."""
    gpu = GpuFacts()
    if any(device.kind == "cuda" for device in settings.devices):
        if not _gpus or _gpus[0].problem:
            _gpus[:] = [gpu_facts()]
        gpu = _gpus[0]
    found = machine_of(settings, memory_facts(), gpu, libc.node_bytes())
    has_cuda_engine = installed_version() is None or is_built_for_gpus()
    return replace(found, has_cuda_engine=has_cuda_engine)


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
        num_nodes, found = host.numa_nodes, tuple(_gpus_of(settings, gpu, environment))
        return Machine(
            host.memory_bytes,
            tuple(
                replace(device, node=place * num_nodes // len(found))
                for place, device in enumerate(found)
            ),
            node_bytes=dict.fromkeys(range(num_nodes), host.memory_bytes // num_nodes),
            is_simulated=True,
        )
    return Machine(
        memory.total_bytes - memory.huge_bytes,
        tuple(_gpus_of(settings, gpu, environment)),
        memory.limit_bytes,
        node_bytes,
    )


def _gpus_of(
    settings: Settings, gpu: GpuFacts, environment: Mapping[str, str]
) -> Iterator[MachineDevice]:
    for number, device in enumerate(settings.devices):
        if device.kind == "cuda":
            for ordinal in device.gpus:
                yield _cuda(number, device, ordinal, gpu, environment)
            continue
        has_bytes = hardware(device.gpu).memory_bytes if device.gpu is not None else None
        facts = MachineDevice(device.kind, _least(has_bytes, device.memory_bytes), device=number)
        yield from [facts] * device.num_gpus


def _cuda(
    number: int, device: DeviceSettings, ordinal: int, gpu: GpuFacts, environment: Mapping[str, str]
) -> MachineDevice:
    index = index_of(gpu, ordinal, environment)
    if index is None:
        entry = visible_entry(ordinal, environment) or ""
        # NVML does not list a part of a GPU by itself.
        is_missing = gpu.has_none or (bool(gpu.gpus) and not entry.startswith("MIG-"))
        return MachineDevice("cuda", device.memory_bytes, None, number, "", ordinal, is_missing)
    found = gpu.gpus[index]
    size_bytes = _least(found.memory_bytes, device.memory_bytes)
    return MachineDevice("cuda", size_bytes, found.node, number, found.name, ordinal)


def _least(*sizes: int | None) -> int | None:
    return min((size for size in sizes if size is not None), default=None)


def index_of(
    gpu: GpuFacts, ordinal: int, environment: Mapping[str, str] = os.environ
) -> int | None:
    """Return NVML's index of a CUDA ordinal, None without such a GPU.

    ``environment`` determines the visible GPUs.
    """
    entry = visible_entry(ordinal, environment)
    if entry is not None and entry.isdecimal():
        return int(entry) if int(entry) < len(gpu.gpus) else None
    uuids = enumerate(card.uuid for card in gpu.gpus)
    return next((index for index, uuid in uuids if entry and uuid.startswith(entry)), None)
