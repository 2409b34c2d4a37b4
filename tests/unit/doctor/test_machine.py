"""The facts about a machine for the devices of a configuration."""

from __future__ import annotations

import pytest

from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.config.schema import Settings, parse_settings
from gpupoold.doctor.facts import Gpu, GpuFacts, MemoryFacts
from gpupoold.doctor.machine import find_machine, machine_of
from gpupoold.errors import ConfigError
from gpupoold.latency.shape import hardware

GIB = 2**30
MEMORY = MemoryFacts(256 * GIB, 200 * GIB, limit_bytes=128 * GIB, huge_bytes=16 * GIB)
GPUS = GpuFacts(
    gpus=(
        Gpu("A10", 22 * GIB, 0, uuid="GPU-aa-1", node=0),
        Gpu("H100", 80 * GIB, 0, uuid="GPU-bb-2", node=1),
    )
)
NODES = {0: 128 * GIB, 1: 128 * GIB}


def settings(**raw: object) -> Settings:
    return parse_settings(raw, "test")


def devices(*names: str, visible: str | None = None) -> tuple[MachineDevice, ...]:
    environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    return machine_of(settings(devices=list(names)), MEMORY, GPUS, NODES, environment).devices


def test_host_memory_without_reserved_huge_pages() -> None:
    found = machine_of(settings(devices=["emulated"]), MEMORY, GpuFacts(), NODES)
    assert found == Machine(240 * GIB, (MachineDevice("emulated", 2 * GIB),), 128 * GIB, NODES)
    assert found.usable_bytes == 128 * GIB


def test_gpus_by_index() -> None:
    assert devices("cuda:1", "cuda:0") == (
        MachineDevice("cuda", 80 * GIB, 1, 0, "H100", 1),
        MachineDevice("cuda", 22 * GIB, 0, 1, "A10", 0),
    )


def test_a_group_has_the_facts_of_each_gpu() -> None:
    group, single = MachineDevice("emulated", 2 * GIB), MachineDevice("emulated", GIB, device=1)
    raw = [
        {"kind": "emulated", "gpus": 2},
        {"kind": "emulated", "memory": "1GiB"},
        {"kind": "cuda", "gpus": [1, 0]},
    ]
    found = machine_of(settings(device=raw), MEMORY, GPUS, NODES, {}).devices
    assert found[:3] == (group, group, single)
    assert [(one.device, one.ordinal, one.node) for one in found[3:]] == [(2, 1, 1), (2, 0, 0)]


def test_simulated_groups_are_spread_over_the_nodes() -> None:
    host = {"memory": "256GB", "numa_nodes": 2}
    found = machine_of(settings(devices=["sim:2x4xA10"], simulated_host=host), MEMORY, GPUS, NODES)
    assert [(one.device, one.node) for one in found.devices] == [(0, 0)] * 4 + [(1, 1)] * 4


@pytest.mark.parametrize("visible", ["1", "GPU-bb-2", "GPU-bb"])
def test_gpus_as_cuda_numbers_them(visible: str) -> None:
    assert devices("cuda:0", visible=visible) == (MachineDevice("cuda", 80 * GIB, 1, 0, "H100", 0),)


@pytest.mark.parametrize("visible", ["7", "GPU-cc", ""])
def test_a_gpu_that_is_not_there_has_no_known_size(visible: str) -> None:
    assert devices("cuda:0", visible=visible) == (
        MachineDevice("cuda", None, ordinal=0, is_missing=True),
    )
    without_driver = machine_of(settings(devices=["cuda:0"]), MEMORY, GpuFacts(), NODES, {})
    assert without_driver.devices == (MachineDevice("cuda", None, ordinal=0),)
    nothing = GpuFacts(problem="NVML Shared Library Not Found", has_none=True)
    found = machine_of(settings(devices=["cuda:0"]), MEMORY, nothing, NODES, {}).devices
    assert found == (MachineDevice("cuda", None, ordinal=0, is_missing=True),)


def test_a_part_of_a_gpu_is_taken_to_be_there() -> None:
    assert devices("cuda:0", visible="MIG-aa") == (MachineDevice("cuda", None, ordinal=0),)


def test_a_device_uses_at_most_its_memory() -> None:
    raw = [{"kind": "cuda", "index": 1, "memory": "30GiB"}, {"kind": "sim", "gpu": "H800"}]
    found = machine_of(settings(device=raw), MEMORY, GPUS, NODES, {})
    assert found.devices == (
        MachineDevice("cuda", 30 * GIB, 1, 0, "H100", 1),
        MachineDevice("sim", hardware("H800").memory_bytes, device=1),
    )


def test_a_simulated_host_replaces_this_one() -> None:
    host = {"memory": "256GB", "numa_nodes": 2}
    found = machine_of(settings(devices=["sim:4xA10"], simulated_host=host), MEMORY, GPUS, NODES)
    assert (found.memory_bytes, found.limit_bytes) == (256 * 10**9, None)
    assert found.is_simulated
    assert found.node_bytes == {0: 128 * 10**9, 1: 128 * 10**9}
    assert [one.node for one in found.devices] == [0, 0, 1, 1]


@pytest.mark.parametrize("names", [["emulated"], ["cuda:0"], ["sim:A10", "emulated"]])
def test_only_simulated_devices_have_a_simulated_host(names: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"simulated_host.memory: needs devices of kind"):
        settings(devices=names, simulated_host={"memory": "1TiB"})


def test_this_machine() -> None:
    found = find_machine(settings(devices=["emulated"]))
    assert found.memory_bytes > GIB
    assert not found.is_simulated
