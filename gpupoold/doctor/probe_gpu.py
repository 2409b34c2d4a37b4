"""Facts about NVIDIA's driver and GPUs, from NVML."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from gpupoold.doctor.facts import Gpu, GpuFacts
from gpupoold.doctor.probe_links import gpu_links
from gpupoold.memory import numa
from gpupoold.system.nvml import connected

_CUDA_DRIVER = "libcuda.so.1"


def gpu_facts(nvml: Any = pynvml) -> GpuFacts:
    """Return the data of NVML; if NVML cannot be used, only ``problem``."""
    is_connected = False
    try:
        with connected(nvml):
            is_connected = True
            number = nvml.nvmlSystemGetCudaDriverVersion_v2()
            count = nvml.nvmlDeviceGetCount()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
            return GpuFacts(
                driver=nvml.nvmlSystemGetDriverVersion(),
                cuda=(number // 1000, number % 1000 // 10),
                gpus=tuple(_gpu(nvml, handle) for handle in handles),
                links=gpu_links(nvml, handles),
                has_none=not count,
            )
    except nvml.NVMLError as error:
        return GpuFacts(problem=str(error), has_none=not is_connected and not _has_driver())


def _has_driver() -> bool:
    """Return whether CUDA's driver library is there; containers may have it without NVML."""
    try:
        ctypes.CDLL(_CUDA_DRIVER)
    except OSError:
        return False
    return True


def _gpu(nvml: Any, handle: object) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        is_mig=_is_mig(nvml, handle),
        is_persistent=_is_persistent(nvml, handle),
        uuid=_uuid(nvml, handle),
        node=_node(nvml, handle),
    )


def _uuid(nvml: Any, handle: object) -> str:
    try:
        return str(nvml.nvmlDeviceGetUUID(handle))
    except nvml.NVMLError:
        return ""


def _node(nvml: Any, handle: object) -> int | None:
    try:
        node = numa.node_of(nvml.nvmlDeviceGetPciInfo(handle).busId)
    except nvml.NVMLError:
        return None
    return None if node == numa.NO_NODE else node


def _is_mig(nvml: Any, handle: object) -> bool:
    try:
        current, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:  # the GPU does not support MIG
        return False
    return bool(current == nvml.NVML_DEVICE_MIG_ENABLE)


def _is_persistent(nvml: Any, handle: object) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED)
    except nvml.NVMLError:
        return True
