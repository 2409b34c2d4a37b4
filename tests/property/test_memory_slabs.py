"""Any order of allocating and freeing blocks of several shapes keeps every byte to one owner."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from gpupoold.memory.slabs import Allocation, SlabAllocator, slab_layout
from tests.unit.memory.kv_mix import shapes_of

SLAB = 64
# Less than a base slab, about one, several, and more than the longest slab of small blocks.
BLOCK_BYTES = st.sampled_from([1, 7, 16, 33, 57, 64, 65, 100, 150, 320, 700])
WHICH = st.integers(0, 1_000)


class SlabMachine(RuleBasedStateMachine):
    @initialize(budget_bytes=st.integers(0, 40 * SLAB))
    def start(self, budget_bytes: int) -> None:
        self.slabs = SlabAllocator(budget_bytes, SLAB)
        self.live: list[Allocation] = []
        self.gone: list[Allocation] = []
        assert budget_bytes - SLAB < self.slabs.num_bytes <= budget_bytes

    @rule(block_bytes=BLOCK_BYTES, num_blocks=st.integers(0, 30))
    def allocate(self, block_bytes: int, num_blocks: int) -> None:
        before = (shapes_of(self.slabs), self.slabs.free_bytes)
        most = self.slabs.num_free_blocks(block_bytes)
        allocation = self.slabs.allocate(block_bytes, num_blocks)
        if allocation is None:
            assert num_blocks > most
            assert (shapes_of(self.slabs), self.slabs.free_bytes) == before
            return
        assert num_blocks <= most
        assert (allocation.block_bytes, allocation.num_blocks) == (block_bytes, num_blocks)
        assert self.slabs.num_free_blocks(block_bytes) == most - num_blocks
        self.live.append(allocation)

    @rule(block_bytes=BLOCK_BYTES)
    def allocate_all_there_is(self, block_bytes: int) -> None:
        self.allocate(block_bytes, self.slabs.num_free_blocks(block_bytes))
        assert self.slabs.num_free_blocks(block_bytes) == 0

    @rule(which=WHICH)
    def free(self, which: int) -> None:
        if self.live:
            allocation = self.live.pop(which % len(self.live))
            self.slabs.free(allocation)
            self.gone.append(allocation)

    @rule(which=WHICH)
    def free_again(self, which: int) -> None:
        if self.gone:
            with pytest.raises(ValueError, match="double free"):
                self.slabs.free(self.gone[which % len(self.gone)])

    @rule()
    def free_all(self) -> None:
        while self.live:
            self.free(0)
        assert self.slabs.free_bytes == self.slabs.num_bytes
        assert shapes_of(self.slabs) == []

    @invariant()
    def bytes_have_one_owner(self) -> None:
        extents = sorted(extent for one in self.live for extent in one.extents)
        end = 0
        for offset, num_bytes in extents:
            assert offset >= end
            assert num_bytes > 0
            end = offset + num_bytes
        assert end <= self.slabs.num_bytes
        for one in self.live:
            assert all(size % one.block_bytes == 0 for _, size in one.extents)
            assert sum(size for _, size in one.extents) == one.num_bytes

    @invariant()
    def a_base_slab_has_one_shape(self) -> None:
        shape_of: dict[int, int] = {}
        for one in self.live:
            for offset, size in one.extents:
                for base in range(offset // SLAB, -(-(offset + size) // SLAB)):
                    assert shape_of.setdefault(base, one.block_bytes) == one.block_bytes

    @invariant()
    def accounts_are_right(self) -> None:
        self.slabs.check_integrity()
        used: Counter[int] = Counter()
        for one in self.live:
            used[one.block_bytes] += one.num_blocks
        shapes = {shape.block_bytes: shape for shape in shapes_of(self.slabs)}
        assert set(shapes) == set(+used), "only shapes with blocks in use have slabs"
        reserved_bytes = 0
        for block_bytes, shape in shapes.items():
            layout = slab_layout(block_bytes, SLAB, self.slabs.num_bytes // SLAB)
            assert shape.num_used == used[block_bytes]
            assert shape.num_blocks == shape.num_slabs * layout.num_blocks
            assert shape.num_slabs <= shape.num_used
            reserved_bytes += shape.num_slabs * layout.num_base_slabs * SLAB
        assert self.slabs.used_bytes == sum(one.num_bytes for one in self.live)
        assert self.slabs.reserved_bytes == reserved_bytes
        assert self.slabs.free_bytes == self.slabs.num_bytes - reserved_bytes

    def teardown(self) -> None:
        if hasattr(self, "slabs"):
            self.free_all()
            self.slabs.check_integrity()


TestSlabs = SlabMachine.TestCase
TestSlabs.settings = settings(max_examples=150, stateful_step_count=40)
