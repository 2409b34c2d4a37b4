"""Budgets never exceed the memory, never shrink when memory grows, and keep what is set."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, strategies as st

from gpupoold.config.budgets import Budgets, Wishes, work_out
from gpupoold.config.machine import Machine, MachineDevice
from gpupoold.errors import SettingError

GIB, MIB = 2**30, 2**20
SIZES = st.integers(0, 4096 * GIB)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    num_nodes = draw(st.integers(1, 4))
    memory_bytes = draw(st.integers(GIB, 4096 * GIB))
    kinds = draw(st.sampled_from([["cuda"], ["emulated"], ["sim"], ["cuda", "emulated"]]))
    devices = st.builds(
        MachineDevice,
        st.sampled_from(kinds),
        st.integers(4 * GIB, 192 * GIB) if "cuda" in kinds else st.integers(MIB, 64 * GIB),
        st.none() | st.integers(0, num_nodes - 1),
    )
    return Machine(
        memory_bytes,
        tuple(draw(st.lists(devices, min_size=1, max_size=16))),
        draw(st.none() | st.integers(GIB, 4096 * GIB)),
        {node: draw(st.integers(GIB, 4096 * GIB)) for node in range(num_nodes)},
    )


def sizes_or_auto(most_bytes: int) -> st.SearchStrategy[int | None]:
    return st.none() | st.integers(0, most_bytes)


WISHES = st.builds(
    Wishes,
    model_cache_bytes=sizes_or_auto(2048 * GIB),
    kv_host_bytes=sizes_or_auto(64 * GIB),
    reserve_bytes=sizes_or_auto(3 * GIB),
    bytes_in_flight=st.none() | st.integers(1, 4 * GIB),
    num_frontends=st.integers(1, 64),
)


def worked_out(wishes: Wishes, machine: Machine) -> Budgets | None:
    try:
        return work_out(wishes, machine)
    except SettingError:
        return None


@given(WISHES, machines())
def test_the_sum_is_had_and_what_is_set_is_kept(wishes: Wishes, machine: Machine) -> None:
    found = worked_out(wishes, machine)
    assume(found is not None)
    assert found is not None
    assert found.used_bytes <= machine.usable_bytes
    assert found.usable_bytes <= min(machine.memory_bytes, machine.limit_bytes or 2**63)
    for set_bytes, has_bytes in (
        (wishes.model_cache_bytes, found.model_cache_bytes),
        (wishes.kv_host_bytes, found.kv_host_bytes),
        (wishes.reserve_bytes, found.reserve_bytes),
        (wishes.bytes_in_flight, found.bytes_in_flight),
    ):
        assert set_bytes is None or set_bytes == has_bytes
    assert found.model_cache_bytes <= max(found.most_model_cache_bytes, 0) or not found.parts
    assert all(found.reasons.values())


@given(WISHES, machines(), SIZES)
def test_more_memory_gives_no_less(wishes: Wishes, machine: Machine, more_bytes: int) -> None:
    before = worked_out(wishes, machine)
    assume(before is not None)
    assert before is not None
    larger = replace(
        machine,
        memory_bytes=machine.memory_bytes + more_bytes,
        limit_bytes=None if machine.limit_bytes is None else machine.limit_bytes + more_bytes,
    )
    after = work_out(wishes, larger)
    assert after.model_cache_bytes >= before.model_cache_bytes
    assert after.kv_host_bytes >= before.kv_host_bytes
    assert after.bytes_in_flight >= before.bytes_in_flight
    assert after.reserve_bytes == before.reserve_bytes


@given(WISHES, machines())
def test_what_is_worked_out_may_be_written_down(wishes: Wishes, machine: Machine) -> None:
    found = worked_out(wishes, machine)
    assume(found is not None)
    assert found is not None
    written = replace(
        wishes,
        model_cache_bytes=found.model_cache_bytes,
        kv_host_bytes=found.kv_host_bytes,
        reserve_bytes=found.reserve_bytes,
        bytes_in_flight=found.bytes_in_flight,
    )
    again = work_out(written, machine)
    assert again.parts == found.parts
    assert again.reasons.keys() <= {"memory.reserve"}
