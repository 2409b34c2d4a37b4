"""Connections of GPUs: what NVML tells, and what the doctor thinks of groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from gpupoold.config.schema import parse_settings
from gpupoold.doctor.checks import Check, Verdict, check_groups
from gpupoold.doctor.facts import Gpu, GpuFacts, GpuLink, PciPath
from gpupoold.doctor.probe_gpu import gpu_links

GIB = 2**30
SWITCH, PEER = 2, 0


class LinkedNvml:
    """As much of ``pynvml`` as is asked for links.

    Handles are indexes. ``nvlinks`` has the remote ends by GPU: an index, or "switch".
    """

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_FEATURE_ENABLED = 1
    NVML_NVLINK_MAX_LINKS = 18
    NVML_NVLINK_DEVICE_TYPE_GPU = PEER
    NVML_NVLINK_DEVICE_TYPE_SWITCH = SWITCH

    def __init__(
        self,
        nvlinks: Mapping[int, list[int | str]],
        paths: Mapping[tuple[int, int], int] | None = None,
        inactive: int = -1,
    ) -> None:
        self._nvlinks = nvlinks
        self._paths = paths or {}
        self._inactive = inactive

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        self._remote(handle, link)
        return int(link != self._inactive)

    def nvmlDeviceGetNvLinkRemoteDeviceType(self, handle: int, link: int) -> int:
        return SWITCH if self._remote(handle, link) == "switch" else PEER

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{self._remote(handle, link):02X}:00.0".encode())

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return SimpleNamespace(busId=f"00000000:{handle:02x}:00.0")

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        if (one, other) not in self._paths:
            raise self.NVMLError("Not Supported")
        return self._paths[one, other]

    def _remote(self, handle: int, link: int) -> int | str:
        ends = self._nvlinks.get(handle, [])
        if link >= len(ends):
            raise self.NVMLError("Invalid Argument")
        return ends[link]


class TestProbe:
    def test_pairs_joined_by_a_bridge(self) -> None:
        """Two bridges of two links each; PCIe across sockets between the pairs."""
        nvlinks: dict[int, list[int | str]] = {10: [11, 11], 11: [10, 10], 12: [13, 13], 13: [12]}
        nvml = LinkedNvml(nvlinks, {(10, 11): 20, (11, 12): 50})
        found = gpu_links(nvml, [10, 11, 12, 13])
        assert len(found) == 6
        assert found[0] == GpuLink(0, 1, 2, is_switched=False, path=PciPath.SWITCHES)
        assert found[3] == GpuLink(1, 2, 0, is_switched=False, path=PciPath.SOCKETS)
        assert found[5] == GpuLink(2, 3, 2)

    def test_switches(self) -> None:
        ends: list[int | str] = ["switch"] * 18
        nvml = LinkedNvml({0: ends, 1: ends, 2: []}, {(0, 1): 50, (0, 2): 7}, inactive=4)
        assert gpu_links(nvml, [0, 1, 2]) == (
            GpuLink(0, 1, 17, is_switched=True, path=PciPath.SOCKETS),
            GpuLink(0, 2),
            GpuLink(1, 2),
        )

    def test_many_gpus_are_not_all_asked(self) -> None:
        assert len(gpu_links(LinkedNvml({}), list(range(100)))) == 16 * 15 // 2


def dgx() -> GpuFacts:
    """Eight GPUs on two nodes, NVSwitch between all."""
    gpus = tuple(
        Gpu("H800", 80 * GIB, 0, uuid=f"GPU-{index}", node=index // 4) for index in range(8)
    )
    pairs = [(one, other) for one in range(8) for other in range(one + 1, 8)]
    links = [GpuLink(*pair, 18, is_switched=True, path=PciPath.SOCKETS) for pair in pairs]
    return GpuFacts("", "580", (13, 0), gpus, tuple(links))


def pcie() -> GpuFacts:
    """Four GPUs on two nodes, pairs joined by a bridge."""
    gpus = tuple(Gpu("A100", 80 * GIB, 0, node=index // 2) for index in range(4))
    links = [
        GpuLink(one, other, 12, path=PciPath.SWITCH)
        if one // 2 == other // 2
        else GpuLink(one, other, path=PciPath.SOCKETS)
        for one in range(4)
        for other in range(one + 1, 4)
    ]
    return GpuFacts("", "580", (13, 0), gpus, tuple(links))


def checked(facts: GpuFacts, *names: str, **environment: str) -> list[Check]:
    return list(check_groups(facts, parse_settings({"devices": list(names)}, "test"), environment))


class TestGroups:
    def test_a_group_on_one_socket(self) -> None:
        (found,) = checked(dgx(), "cuda:0-3", "cuda:5")
        assert (found.name, found.verdict) == ("group 0", Verdict.OK)
        assert found.found == "GPUs 0, 1, 2, 3: 18 NVLinks between each two through NVSwitch"

    def test_a_group_across_sockets_that_one_socket_could_have(self) -> None:
        (found,) = checked(dgx(), "cuda:0", "cuda:2-5")
        assert (found.name, found.verdict) == ("group 1", Verdict.WARNING)
        assert found.found.endswith(
            "but on NUMA nodes 0, 1: the ranks wait for each other across sockets"
        )
        assert "nvidia-smi topo -m" in found.fix

    def test_a_group_that_no_socket_has_place_for(self) -> None:
        (found,) = checked(dgx(), "cuda:0-7")
        assert found.verdict == Verdict.OK

    def test_a_group_without_nvlink(self) -> None:
        paired, apart = checked(pcie(), "cuda:0-1", "cuda:2-3")
        assert (paired.verdict, apart.verdict) == (Verdict.OK, Verdict.OK)
        assert paired.found == "GPUs 0, 1: 12 NVLinks between each two"
        (found,) = checked(pcie(), "cuda:1-2")
        assert found.verdict == Verdict.WARNING
        assert found.found == (
            "GPUs 1, 2: no NVLink between 1 and 2 (PCIe across sockets): steps are slower"
        )

    def test_gpus_as_cuda_numbers_them(self) -> None:
        (found,) = checked(pcie(), "cuda:0-1", CUDA_VISIBLE_DEVICES="1,2,3")
        assert "no NVLink between 1 and 2" in found.found
        visible = "GPU-4,GPU-5,GPU-6,GPU-7"
        (found,) = checked(dgx(), "cuda:0-3", CUDA_VISIBLE_DEVICES=visible)
        assert found.found.startswith("GPUs 4, 5, 6, 7: 18 NVLinks")

    def test_what_nvml_does_not_tell_is_no_reason_to_warn(self) -> None:
        unknown = replace(pcie(), links=())
        (found,) = checked(unknown, "cuda:1-2")
        assert (found.verdict, found.found) == (Verdict.OK, "GPUs 1, 2: connections unknown")

    def test_other_devices_and_missing_gpus_have_no_check(self) -> None:
        assert checked(pcie(), "cuda:0", "emulated", "sim:2x4xH800", "cuda:4-7") == []
