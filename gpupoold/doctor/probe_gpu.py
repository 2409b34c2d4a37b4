"""Facts about NVIDIA's driver and GPUs, from NVML."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import pynvml

from gpupoold.doctor.facts import Gpu, GpuFacts, GpuLink, PciPath
from gpupoold.memory import libc
from gpupoold.system.nvml import connected, has_display

_CUDA_DRIVER = "libcuda.so.1"

T = TypeVar("T")
# A box has up to 16 GPUs; more would make hundreds of calls of the driver.
_MAX_GPUS = 16


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

    def is_mig() -> bool:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0] == nvml.NVML_DEVICE_MIG_ENABLE)

    def is_persistent() -> bool:
        return bool(nvml.nvmlDeviceGetPersistenceMode(handle) == nvml.NVML_FEATURE_ENABLED)

    def node() -> int:
        return libc.node_of(nvml.nvmlDeviceGetPciInfo(handle).busId)

    found = _known(nvml, libc.NO_NODE, node)
    return Gpu(
        name=nvml.nvmlDeviceGetName(handle),
        memory_bytes=memory.total,
        used_bytes=memory.used,
        is_mig=_known(nvml, False, is_mig),  # a GPU may not support MIG
        is_persistent=_known(nvml, True, is_persistent),
        uuid=str(_known(nvml, "", nvml.nvmlDeviceGetUUID, handle)),
        node=None if found == libc.NO_NODE else found,
        has_display=has_display(handle, nvml),
    )


def _known(nvml: Any, default: T, read: Callable[..., T], *args: object) -> T:
    """Return what NVML tells, or the default."""
    try:
        return read(*args)
    except (nvml.NVMLError, ValueError):
        return default


class _NvLinks(NamedTuple):
    """The active NVLinks of a GPU: by PCI address of the GPU at the other end, and to switches."""

    to_gpus: Counter[str]
    num_to_switches: int


def gpu_links(nvml: Any, handles: Sequence[object]) -> tuple[GpuLink, ...]:
    """Return the connection of each two GPUs, in the order of NVML's indexes."""

    def address(handle: object) -> str:
        return _bus_id(nvml.nvmlDeviceGetPciInfo(handle))

    def path_of(handle: object, other: object) -> PciPath | None:
        return PciPath(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))

    known = list(enumerate(handles))[:_MAX_GPUS]
    nvlinks = {index: _nvlinks(nvml, handle) for index, handle in known}
    addresses = {index: _known(nvml, "", address, handle) for index, handle in known}
    found: list[GpuLink] = []
    for (one, handle), (other, other_handle) in itertools.combinations(known, 2):
        direct = nvlinks[one].to_gpus[addresses[other]] if addresses[other] else 0
        switched = min(nvlinks[one].num_to_switches, nvlinks[other].num_to_switches)
        path = _known(nvml, None, path_of, handle, other_handle)
        found.append(GpuLink(one, other, direct or switched, not direct and switched > 0, path))
    return tuple(found)


def _nvlinks(nvml: Any, handle: object) -> _NvLinks:
    to_gpus: Counter[str] = Counter()
    num_to_switches = 0
    for link in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            if nvml.nvmlDeviceGetNvLinkState(handle, link) != nvml.NVML_FEATURE_ENABLED:
                continue
            kind = nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link)
            if kind == nvml.NVML_NVLINK_DEVICE_TYPE_SWITCH:
                num_to_switches += 1
            elif kind == nvml.NVML_NVLINK_DEVICE_TYPE_GPU:
                to_gpus[_bus_id(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link))] += 1
        except nvml.NVMLError:  # the GPU has no such link
            continue
    return _NvLinks(to_gpus, num_to_switches)


def _bus_id(pci: Any) -> str:
    """Return the address as text, in one spelling; pynvml returns bytes or text."""
    bus_id = pci.busId
    return (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()
