"""Budgets that are worked out: the documented boxes, what is kept, what is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpupoold.config.budgets import (
    BYTES_IN_FLIGHT,
    KV_HOST,
    MODEL_CACHE,
    RESERVE,
    Budgets,
    Wishes,
    work_out,
)
from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.errors import SettingError
from gpupoold.latency.shape import hardware
from gpupoold.units import parse_size_bytes

DOCS = Path(__file__).parents[3] / "docs" / "configuration.md"
GIB = 2**30
EMULATED = MachineDevice("emulated", 2 * GIB)


def box(num_gpus: int, gpu: str, memory_bytes: int, num_nodes: int = 1) -> Machine:
    gpu_bytes = hardware(gpu).memory_bytes
    devices = (
        MachineDevice("cuda", gpu_bytes, number * num_nodes // num_gpus, number)
        for number in range(num_gpus)
    )
    nodes = dict.fromkeys(range(num_nodes), memory_bytes // num_nodes)
    return Machine(memory_bytes, tuple(devices), None, nodes)


SMALL = box(1, "A10", 64 * 10**9)
MEDIUM = box(4, "A10", 256 * 10**9, 2)
LARGE = box(8, "H800", 2 * 10**12, 2)


def documented() -> Iterator[tuple[Machine, list[int]]]:
    row = r"\| (\d+)x(\w+) \| (\d+ [GT]B), (\d) nodes? \| " + " \\| ".join(["`(\\w+)`"] * 4)
    for found in re.finditer(row, DOCS.read_text()):
        count, gpu, memory, nodes, *budgets = found.groups()
        machine = box(int(count), gpu, parse_size_bytes(memory), int(nodes))
        yield machine, [parse_size_bytes(one) for one in budgets]


def test_documented_boxes() -> None:
    rows = list(documented())
    assert [machine for machine, _ in rows] == [SMALL, MEDIUM, LARGE]
    for machine, figures in rows:
        found = work_out(Wishes(), machine)
        assert figures == [
            found.model_cache_bytes,
            found.kv_host_bytes,
            found.reserve_bytes,
            found.bytes_in_flight,
        ]


def test_the_arithmetic_is_given_and_adds_up() -> None:
    found = work_out(Wishes(), MEDIUM)
    assert found.reasons[KV_HOST] == "half of the 22.5 GiB of a device"
    assert found.reasons[MODEL_CACHE] == (
        "238 GiB of host memory less: memory.kv_host 4 x 11 GiB, processes 16.8 GiB, "
        "requests 2.79 GiB, system 12.9 GiB"
    )
    assert found.reasons[RESERVE] == "2 GiB and 1/64 of 22.5 GiB, at most 3 GiB"
    assert found.reasons.keys() == {MODEL_CACHE, KV_HOST, RESERVE, BYTES_IN_FLIGHT}
    left_bytes = found.usable_bytes - found.system_bytes - found.used_bytes
    assert 0 <= left_bytes < 5 * GIB  # rounded down: the cache, and each device's KV


def test_a_small_machine_with_an_emulated_device() -> None:
    found = work_out(Wishes(), Machine(24 * GIB, (EMULATED,)))
    assert (found.kv_host_bytes, found.reserve_bytes) == (2 * GIB, 0)
    assert 12 * GIB < found.model_cache_bytes < 18 * GIB
    assert "emulated devices 2 GiB" in found.reasons[MODEL_CACHE]


def test_the_lower_limit_of_a_control_group_counts() -> None:
    limited = Machine(MEDIUM.memory_bytes, MEDIUM.devices, 64 * GIB, MEDIUM.node_bytes)
    found = work_out(Wishes(), limited)
    assert found.usable_bytes == 64 * GIB
    assert found.reasons[MODEL_CACHE].startswith("64 GiB of the control group's limit less: ")
    assert found.used_bytes <= 64 * GIB
    high = Machine(64 * GIB, SMALL.devices, 500 * GIB)
    assert "of host memory" in work_out(Wishes(), high).reasons[MODEL_CACHE]


def test_a_small_node_bounds_the_kv_pinned_there() -> None:
    nodes = {0: 240 * 10**9, 1: 16 * 10**9}
    found = work_out(Wishes(), Machine(256 * 10**9, MEDIUM.devices, None, nodes))
    assert found.reasons[KV_HOST] == "half of the 14.9 GiB of NUMA node 1, over 2 devices"
    assert 2 * found.kv_host_bytes <= nodes[1] / 2


def test_groups_take_host_memory_for_each_gpu() -> None:
    grouped = tuple(replace(one, device=one.device // 2) for one in MEDIUM.devices)
    nodes = {0: 240 * 10**9, 1: 16 * 10**9}
    found = work_out(Wishes(), Machine(256 * 10**9, grouped, None, nodes))
    singles = work_out(Wishes(), Machine(256 * 10**9, MEDIUM.devices, None, nodes))
    assert found.reasons[KV_HOST] == "half of the 14.9 GiB of NUMA node 1, over 2 GPUs"
    assert (found.kv_host_bytes, found.model_cache_bytes, found.parts) == (
        singles.kv_host_bytes,
        singles.model_cache_bytes,
        singles.parts,
    )


def test_little_memory_bounds_kv_by_a_quarter() -> None:
    found = work_out(Wishes(), box(1, "A10", 32 * 10**9))
    assert found.reasons[KV_HOST].startswith("a quarter of what is left, ")
    assert found.model_cache_bytes > 2 * found.kv_host_bytes


def test_set_budgets_are_kept_and_the_others_follow() -> None:
    found = work_out(Wishes(model_cache_bytes=50 * GIB), SMALL)
    assert found.model_cache_bytes == 50 * GIB
    assert 0 < found.kv_host_bytes < 4 * GIB
    assert MODEL_CACHE not in found.reasons
    found = work_out(Wishes(kv_host_bytes=30 * GIB, reserve_bytes=GIB, bytes_in_flight=7), MEDIUM)
    assert (found.kv_host_bytes, found.reserve_bytes, found.bytes_in_flight) == (30 * GIB, GIB, 7)
    assert found.reasons.keys() == {MODEL_CACHE}
    assert found.model_cache_bytes + 4 * 30 * GIB < MEDIUM.memory_bytes


def test_simulated_devices_use_no_host_memory() -> None:
    found = work_out(Wishes(), Machine(GIB, (MachineDevice("sim", 80 * GIB),) * 16))
    assert (found.model_cache_bytes, found.kv_host_bytes, found.reserve_bytes) == (0, 0, 0)
    assert found.parts == ()


def test_a_simulated_host_is_divided_like_a_real_one() -> None:
    devices = tuple(MachineDevice("sim", one.memory_bytes, one.node) for one in MEDIUM.devices)
    simulated = Machine(MEDIUM.memory_bytes, devices, None, MEDIUM.node_bytes, is_simulated=True)
    found, real = work_out(Wishes(), simulated), work_out(Wishes(), MEDIUM)
    assert (found.model_cache_bytes, found.kv_host_bytes) == (
        real.model_cache_bytes,
        real.kv_host_bytes,
    )
    assert "of simulated host memory less" in found.reasons[MODEL_CACHE]


@pytest.mark.parametrize(
    ("wishes", "gib"),
    [
        (Wishes(reserve_bytes=3 * GIB), None),
        (Wishes(reserve_bytes=7 * GIB), 7.5),
        (Wishes(reserve_bytes=7 * GIB, engines_bytes=2 * GIB), None),
        (Wishes(engines_bytes=int(6.25 * GIB)), 10.0),
    ],
)
def test_more_engines_than_by_default_take_host_memory(wishes: Wishes, gib: float | None) -> None:
    found = {part.name: part for part in work_out(wishes, MEDIUM).parts}.get("engines")
    assert (None if found is None else (found.each_bytes / GIB, found.count)) == (
        None if gib is None else (gib, 4)
    )


def test_devices_of_several_kinds_have_no_common_reserve() -> None:
    found = work_out(Wishes(), Machine(64 * GIB, (*SMALL.devices, EMULATED)))
    assert found.reserve_bytes is None
    assert found.reasons[RESERVE] == "3 GiB on GPUs, none on other devices"


def test_a_gpu_of_unknown_size_gets_the_least() -> None:
    found = work_out(Wishes(), Machine(64 * GIB, (MachineDevice("cuda", None),)))
    assert (found.kv_host_bytes, found.reserve_bytes) == (2 * GIB, 3 * GIB)


REFUSED = [
    (
        SMALL,
        Wishes(model_cache_bytes=60 * GIB),
        MODEL_CACHE,
        "65.5 GiB are needed (memory.model_cache 60 GiB, processes 4.75 GiB, requests 732 MiB), "
        "but host memory is 59.6 GiB",
        "lower memory.model_cache",
    ),
    (
        MEDIUM,
        Wishes(model_cache_bytes=20 * GIB, kv_host_bytes=60 * GIB),
        KV_HOST,
        "memory.kv_host 4 x 60 GiB, memory.model_cache 20 GiB",
        "lower memory.kv_host",
    ),
    (
        MEDIUM,
        Wishes(kv_host_bytes=55 * GIB),
        KV_HOST,
        "memory.kv_host 4 x 55 GiB",
        "lower memory.kv_host",
    ),
    (
        Machine(24 * GIB, (EMULATED,), 2 * GIB),
        Wishes(),
        "device",
        "(emulated devices 2 GiB, processes 1.25 GiB, requests 192 MiB), but the control group's "
        "limit is 2 GiB",
        "MemoryMax=",
    ),
    (
        Machine(24 * GIB, (MachineDevice("emulated", 12 * GIB),) * 2),
        Wishes(),
        "device",
        "emulated devices 24 GiB",
        "use fewer or smaller devices",
    ),
    (
        SMALL,
        Wishes(reserve_bytes=23 * GIB),
        RESERVE,
        "23 GiB leaves no memory of device 0, which has 22.5 GiB",
        "lower memory.reserve",
    ),
    (
        Machine(64 * GIB, (MachineDevice("cuda", 2 * GIB),)),
        Wishes(),
        RESERVE,
        "2.25 GiB leaves no memory of device 0, which has 2 GiB",
        "raise device.memory",
    ),
]


@pytest.mark.parametrize(("machine", "wishes", "key", "what", "hint"), REFUSED)
def test_sums_that_cannot_be_had(
    machine: Machine, wishes: Wishes, key: str, what: str, hint: str
) -> None:
    with pytest.raises(SettingError) as caught:
        work_out(wishes, machine)
    error = caught.value
    assert (error.key, error.exit_code) == (key, 2)
    assert what in error.what
    assert error.message == f"{key}: {error.what}"
    assert hint in error.hint


def test_the_largest_model_cache_is_accepted_and_no_larger_one() -> None:
    found: Budgets = work_out(Wishes(kv_host_bytes=8 * GIB), MEDIUM)
    most_bytes = found.most_model_cache_bytes
    work_out(Wishes(model_cache_bytes=most_bytes, kv_host_bytes=8 * GIB), MEDIUM)
    with pytest.raises(SettingError):
        work_out(Wishes(model_cache_bytes=most_bytes + 1, kv_host_bytes=8 * GIB), MEDIUM)
