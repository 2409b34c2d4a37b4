"""Checks of the connections in groups of GPUs. Pure."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from gpupoold.config.schema import Settings
from gpupoold.doctor.check import Check, ok, warning
from gpupoold.doctor.facts import GpuFacts, GpuLink, PciPath
from gpupoold.doctor.machine import index_of

_PATHS = {
    PciPath.BOARD: "on one board",
    PciPath.SWITCH: "one PCIe switch",
    PciPath.SWITCHES: "several PCIe switches",
    PciPath.HOST_BRIDGE: "a PCIe host bridge",
    PciPath.NODE: "several host bridges of a socket",
    PciPath.SOCKETS: "PCIe across sockets",
}
_FIX = "group GPUs that `nvidia-smi topo -m` shows connected by NVLink (NV...), on one socket"


def check_groups(
    gpu: GpuFacts, settings: Settings, environment: Mapping[str, str] = os.environ
) -> Iterator[Check]:
    """Check the connections of each group of GPUs: NVLink, and one socket where possible.

    ``environment`` determines the visible GPUs.
    """
    for number, device in enumerate(settings.devices):
        if device.kind == "cuda" and device.num_gpus > 1:
            found = [index_of(gpu, ordinal, environment) for ordinal in device.gpus]
            indexes = [index for index in found if index is not None]
            if len(indexes) == len(found):  # the check of groups names a GPU that is missing
                yield _check_group(f"group {number}", gpu, indexes)


def _check_group(name: str, gpu: GpuFacts, indexes: Sequence[int]) -> Check:
    shown = f"GPUs {', '.join(map(str, indexes))}"
    pairs = list(itertools.combinations(sorted(indexes), 2))
    links = [link for one, other in pairs if (link := gpu.link(one, other)) is not None]
    if len(links) < len(pairs):
        return ok(name, f"{shown}: connections unknown")
    lacking = [link for link in links if not link.num_nvlinks]
    if lacking:
        worst = max(lacking, key=lambda link: -1 if link.path is None else link.path)
        return warning(name, f"{shown}: no NVLink {_between(worst)}: steps are slower", _FIX)
    found = f"{shown}: {_nvlink_text(links)}"
    nodes = {node for index in indexes if (node := gpu.gpus[index].node) is not None}
    if len(nodes) > 1 and _fits_on_a_node(gpu, len(indexes)):
        text = f"{found}, but on NUMA nodes {', '.join(map(str, sorted(nodes)))}"
        return warning(name, f"{text}: the ranks wait for each other across sockets", _FIX)
    return ok(name, found)


def _fits_on_a_node(gpu: GpuFacts, num_gpus: int) -> bool:
    """Return whether a NUMA node has as many GPUs as the group."""
    counts = Counter(one.node for one in gpu.gpus if one.node is not None)
    return max(counts.values(), default=0) >= num_gpus


def _nvlink_text(links: Sequence[GpuLink]) -> str:
    least = min(link.num_nvlinks for link in links)
    through = " through NVSwitch" if all(link.is_switched for link in links) else ""
    return f"{least} NVLink{'' if least == 1 else 's'} between each two{through}"


def _between(link: GpuLink) -> str:
    path = "an unknown path" if link.path is None else _PATHS[link.path]
    return f"between {link.first} and {link.second} ({path})"
