"""The connections of GPUs, over NVLink and PCIe, from NVML."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from gpupoold.doctor.facts import GpuLink, PciPath

# A box has up to 16 GPUs; more would make hundreds of calls of the driver.
_MAX_GPUS = 16


class _NvLinks(NamedTuple):
    """The active NVLinks of a GPU: by PCI address of the GPU at the other end, and to switches."""

    to_gpus: Counter[str]
    num_to_switches: int


def gpu_links(nvml: Any, handles: Sequence[object]) -> tuple[GpuLink, ...]:
    """Return the connection of each two GPUs, in the order of NVML's indexes."""
    known = list(enumerate(handles))[:_MAX_GPUS]
    nvlinks = {index: _nvlinks(nvml, handle) for index, handle in known}
    addresses = {index: _address(nvml, handle) for index, handle in known}
    found: list[GpuLink] = []
    for (one, handle), (other, other_handle) in itertools.combinations(known, 2):
        direct = nvlinks[one].to_gpus[addresses[other]] if addresses[other] else 0
        switched = min(nvlinks[one].num_to_switches, nvlinks[other].num_to_switches)
        path = _path(nvml, handle, other_handle)
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


def _address(nvml: Any, handle: object) -> str:
    try:
        return _bus_id(nvml.nvmlDeviceGetPciInfo(handle))
    except nvml.NVMLError:
        return ""


def _bus_id(pci: Any) -> str:
    """Return the address as text, in one spelling; pynvml returns bytes or text."""
    bus_id = pci.busId
    return (bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)).lower()


def _path(nvml: Any, handle: object, other: object) -> PciPath | None:
    try:
        return PciPath(nvml.nvmlDeviceGetTopologyCommonAncestor(handle, other))
    except (nvml.NVMLError, ValueError):
        return None
