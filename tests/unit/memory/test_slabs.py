"""Slabs per shape: where blocks go, when slabs are taken and reclaimed, how much they waste."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.memory.slabs import (
    Allocation,
    BlockPlace,
    Extent,
    SlabAllocator,
    SlabLayout,
    slab_bytes_for,
    slab_layout,
)
from tests.unit.memory.kv_mix import (
    TABLE_1_TOKEN_BYTES,
    TWELVE_TOKEN_BYTES,
    KvMix,
    ShapeUse,
    shapes_of,
)

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SLAB = 1000


class TestLayout:
    @pytest.mark.parametrize(
        ("block_bytes", "num_base_slabs", "num_blocks"),
        [
            (1, 1, 1000),
            (300, 1, 3),  # 10 % unused
            (875, 1, 1),  # exactly 1/8
            (874, 7, 8),  # 6 base slabs: 5244 of 6000 used, 7: 6992 of 7000
            (400, 2, 5),
            (1000, 1, 1),
            (1001, 8, 7),
            (2500, 5, 2),
            (4010, 5, 1),  # no length up to 8 leaves 1/8 or less: 5 leaves the least
            (8000, 8, 1),
            (8001, 9, 1),
            (30_500, 31, 1),
        ],
    )
    def test_shortest_slab_with_a_short_tail(
        self, block_bytes: int, num_base_slabs: int, num_blocks: int
    ) -> None:
        layout = slab_layout(block_bytes, SLAB, 100)
        assert layout == SlabLayout(block_bytes, num_base_slabs, num_blocks)

    def test_no_longer_than_the_buffer(self) -> None:
        assert slab_layout(1001, SLAB, 3) == SlabLayout(1001, 3, 2)
        assert slab_layout(1001, SLAB, 1).num_blocks == 0
        assert slab_layout(1, SLAB, 0).num_blocks == 0

    def test_paper_shapes_in_default_slabs_of_64_gib(self) -> None:
        layouts = [slab_layout(16 * size, 256 * MIB, 256) for size in TABLE_1_TOKEN_BYTES]
        assert [(one.num_base_slabs, one.num_blocks) for one in layouts] == [
            (1, 32),
            (1, 128),
            (1, 20),
            (1, 6),
        ]

    @pytest.mark.parametrize("block_bytes", [0, -1])
    def test_a_block_has_bytes(self, block_bytes: int) -> None:
        with pytest.raises(ValueError, match=f"a KV block has {block_bytes} bytes"):
            slab_layout(block_bytes, SLAB, 8)
        with pytest.raises(ValueError, match=f"a KV block has {block_bytes} bytes"):
            SlabAllocator(0, SLAB).num_free_blocks(block_bytes)


@pytest.mark.parametrize(
    ("budget_bytes", "slab_bytes"),
    [
        (0, 4 * KIB),
        (128 * KIB, 4 * KIB),
        (2 * GIB - 1, 4 * MIB),
        (2 * GIB, 8 * MIB),
        (3 * GIB, 8 * MIB),
        (64 * GIB, 256 * MIB),
        (2048 * GIB, GIB),
    ],
)
def test_default_slab_size(budget_bytes: int, slab_bytes: int) -> None:
    assert slab_bytes_for(budget_bytes) == slab_bytes


class TestAllocate:
    def test_blocks_in_order_in_new_slabs(self) -> None:
        slabs = SlabAllocator(10 * SLAB + 999, SLAB)
        assert slabs.num_bytes == 10 * SLAB
        taken = allocate(slabs, 300, 5)
        assert taken.extents == (Extent(0, 900), Extent(1000, 600))
        assert (taken.block_bytes, taken.num_blocks, taken.num_bytes) == (300, 5, 1500)
        assert shapes_of(slabs) == [ShapeUse(300, num_slabs=2, num_blocks=6, num_used=5)]
        assert (slabs.used_bytes, slabs.reserved_bytes, slabs.free_bytes) == (1500, 2000, 8000)
        slabs.check_integrity()

    def test_free_blocks_of_the_shape_come_first(self) -> None:
        slabs = SlabAllocator(10 * SLAB, SLAB)
        allocate(slabs, 300, 2)
        allocate(slabs, 100, 1)
        assert allocate(slabs, 300, 2).extents == (Extent(600, 300), Extent(2000, 300))
        assert [one.num_slabs for one in shapes_of(slabs)] == [1, 2]

    def test_the_fullest_slab_comes_first(self) -> None:
        slabs = SlabAllocator(10 * SLAB, SLAB)
        first, second, third = (
            [allocate(slabs, 100, count) for count in counts] for counts in ((7, 3), (2, 8), (6, 4))
        )
        for one in (first[1], second[1], third[1]):
            slabs.free(one)
        # 3 blocks are free in the first slab, 8 in the second, 4 in the third.
        taken = allocate(slabs, 100, 8)
        assert taken.extents == (Extent(700, 300), Extent(2600, 400), Extent(1200, 100))

    def test_best_fit_within_a_slab(self) -> None:
        slabs = SlabAllocator(SLAB, SLAB)
        parts = [allocate(slabs, 100, count) for count in (1, 3, 1, 2, 1, 2)]
        for part in parts[1::2]:
            slabs.free(part)
        assert allocate(slabs, 100, 2).extents == (Extent(500, 200),)
        assert allocate(slabs, 100, 5).extents == (Extent(100, 300), Extent(800, 200))

    def test_a_slab_of_several_base_slabs_is_one_piece(self) -> None:
        slabs = SlabAllocator(12 * SLAB, SLAB)
        assert allocate(slabs, 2500, 1).extents == (Extent(0, 2500),)
        assert slabs.reserved_bytes == 5 * SLAB
        assert allocate(slabs, 400, 1).extents == (Extent(5000, 400),)

    def test_slabs_without_a_gap_between_them_are_one_piece(self) -> None:
        slabs = SlabAllocator(12 * SLAB, SLAB)
        assert allocate(slabs, 2500, 3).extents == (Extent(0, 7500),)
        assert allocate(slabs, 900, 2).extents == (Extent(10_000, 900), Extent(11_000, 900))

    def test_a_slab_needs_base_slabs_side_by_side(self) -> None:
        slabs = SlabAllocator(10 * SLAB, SLAB)
        singles = [allocate(slabs, 1000, 1) for _ in range(10)]
        for single in singles[::2]:
            slabs.free(single)
        assert slabs.free_bytes == 5 * SLAB
        assert slabs.num_free_blocks(400) == 0
        assert slabs.allocate(400, 1) is None
        slabs.free(singles[1])
        assert slabs.num_free_blocks(400) == 5
        assert allocate(slabs, 400, 1).extents == (Extent(0, 400),)

    def test_nothing_asked_nothing_taken(self) -> None:
        slabs = SlabAllocator(0, SLAB)
        empty = allocate(slabs, 100, 0)
        assert (empty.extents, empty.num_bytes, shapes_of(slabs)) == ((), 0, [])
        slabs.free(empty)
        assert slabs.num_free_blocks(100) == 0
        assert slabs.allocate(100, 1) is None
        slabs.check_integrity()

    @pytest.mark.parametrize("block_bytes", [300, 400, 900, 1001, 2500, 5000, 9000, 50_000])
    def test_all_that_is_said_to_be_free_and_no_more(self, block_bytes: int) -> None:
        slabs = SlabAllocator(17 * SLAB, SLAB)
        allocate(slabs, 100, 11)
        allocate(slabs, 2500, 1)
        before = (shapes_of(slabs), slabs.reserved_bytes)
        most = slabs.num_free_blocks(block_bytes)
        assert slabs.allocate(block_bytes, most + 1) is None
        assert (shapes_of(slabs), slabs.reserved_bytes) == before
        assert allocate(slabs, block_bytes, most).num_blocks == most
        assert slabs.num_free_blocks(block_bytes) == 0
        slabs.check_integrity()

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="-1 KV blocks"):
            SlabAllocator(SLAB, SLAB).allocate(100, -1)
        with pytest.raises(ValueError, match="-1 bytes cannot be cut"):
            SlabAllocator(-1, SLAB)
        with pytest.raises(ValueError, match="slabs of 0 bytes"):
            SlabAllocator(SLAB, 0)


class TestFree:
    def test_an_empty_slab_is_reclaimed_at_once(self) -> None:
        slabs = SlabAllocator(3 * SLAB, SLAB)
        first, second = allocate(slabs, 100, 12), allocate(slabs, 100, 3)
        slabs.free(first)  # its second slab has blocks of both
        assert shapes_of(slabs) == [ShapeUse(100, num_slabs=1, num_blocks=10, num_used=3)]
        assert slabs.num_free_blocks(1000) == 2
        slabs.free(second)
        assert (shapes_of(slabs), slabs.free_bytes) == ([], 3 * SLAB)
        assert allocate(slabs, 1500, 2).extents == (Extent(0, 3000),)

    def test_neighbours_are_joined(self) -> None:
        slabs = SlabAllocator(SLAB, SLAB)
        parts = [allocate(slabs, 100, 1) for _ in range(10)]
        for index in (3, 5, 4):
            slabs.free(parts[index])
        assert allocate(slabs, 100, 3).extents == (Extent(300, 300),)

    @pytest.mark.parametrize("num_blocks", [0, 3])
    def test_freeing_twice_changes_nothing(self, num_blocks: int) -> None:
        slabs = SlabAllocator(SLAB, SLAB)
        taken = allocate(slabs, 100, num_blocks)
        slabs.free(taken)
        again = allocate(slabs, 100, num_blocks)  # the same bytes
        with pytest.raises(ValueError, match=f"double free of {num_blocks} KV blocks of 100 bytes"):
            slabs.free(taken)
        assert slabs.used_bytes == again.num_bytes
        slabs.check_integrity()

    def test_only_what_was_allocated_here(self) -> None:
        slabs, other = SlabAllocator(SLAB, SLAB), SlabAllocator(SLAB, SLAB)
        taken = allocate(slabs, 100, 3)
        with pytest.raises(ValueError, match="double free"):
            other.free(taken)
        with pytest.raises(ValueError, match="double free"):
            slabs.free(replace(taken))
        slabs.free(taken)


class TestPaperMix:
    """Fragmentation stays under 20 % (Aegaeon, section 7.3 and figure 16)."""

    @pytest.mark.parametrize("fill", [0.5, 0.7, 0.9])
    @pytest.mark.parametrize(
        ("token_bytes", "models_per_shape"), [(TABLE_1_TOKEN_BYTES, 10), (TWELVE_TOKEN_BYTES, 4)]
    )
    def test_default_slabs(
        self, token_bytes: tuple[int, ...], models_per_shape: int, fill: float
    ) -> None:
        slabs = SlabAllocator(64 * GIB, slab_bytes_for(64 * GIB))
        result = KvMix(slabs, fill, token_bytes, models_per_shape).play()
        assert result.used_share == pytest.approx(fill, abs=0.05)
        assert result.fragmentation < 0.2

    def test_a_large_host(self) -> None:
        slabs = SlabAllocator(512 * GIB, slab_bytes_for(512 * GIB))
        result = KvMix(slabs, fill=0.6).play(num_turns=600, num_warmup=400)
        assert result.used_share == pytest.approx(0.6, abs=0.05)
        assert result.worst_fragmentation < 0.2

    def test_far_larger_slabs_would_not_do(self) -> None:
        result = KvMix(SlabAllocator(64 * GIB, 4 * GIB), fill=0.5).play()
        assert result.fragmentation > 0.2

    def test_a_full_cache_refuses_and_keeps_its_bytes_in_use(self) -> None:
        slabs = SlabAllocator(64 * GIB, slab_bytes_for(64 * GIB))
        mix = KvMix(slabs, fill=1.3)
        result = mix.play(num_turns=300, num_warmup=150)
        assert result.num_refused > 100
        assert result.used_share > 0.9
        mix.stop()
        assert (shapes_of(slabs), slabs.free_bytes) == ([], slabs.num_bytes)
        slabs.check_integrity()


def allocate(slabs: SlabAllocator, block_bytes: int, num_blocks: int) -> Allocation:
    allocation = slabs.allocate(block_bytes, num_blocks)
    assert allocation is not None
    return allocation


class TestClaims:
    """Blocks at the places that an earlier allocator gave."""

    def test_the_same_places_give_the_same_blocks(self) -> None:
        before, after = SlabAllocator(40 * SLAB, SLAB), SlabAllocator(40 * SLAB, SLAB)
        for block_bytes in (300, 1001, 875):
            spacer = before.allocate(block_bytes, 3)
            kept = before.allocate(block_bytes, 9)
            assert spacer is not None
            assert kept is not None
            before.free(spacer)
            claimed = after.claim(block_bytes, kept.places)
            assert claimed is not None
            assert claimed.extents == kept.extents
            assert claimed.num_bytes == kept.num_bytes
            after.check_integrity()
        others = [after.allocate(300, 1) for _ in range(3)]
        after.check_integrity()
        for one in (*others, claimed):
            assert one is not None
            after.free(one)
        after.check_integrity()

    @pytest.mark.parametrize(
        "places",
        [
            [BlockPlace(0, 0)],  # in use
            [BlockPlace(5, 0), BlockPlace(5, 0)],  # twice
            [BlockPlace(5, 0), BlockPlace(0, 1)],  # the second is in use
            [BlockPlace(5, 3)],  # a slab has three blocks
            [BlockPlace(10, 0)],
            [BlockPlace((1 << 32) - 1, (1 << 32) - 1)],
        ],
    )
    def test_what_cannot_be_claimed_changes_nothing(self, places: list[BlockPlace]) -> None:
        allocator = SlabAllocator(10 * SLAB, SLAB)
        assert allocator.allocate(300, 2) is not None
        before = shapes_of(allocator), allocator.free_bytes
        assert allocator.claim(300, places) is None
        allocator.check_integrity()
        assert (shapes_of(allocator), allocator.free_bytes) == before

    def test_a_place_in_the_middle_of_another_shapes_slab(self) -> None:
        allocator = SlabAllocator(40 * SLAB, SLAB)
        long = allocator.allocate(1001, 1)  # eight base slabs
        assert long is not None
        assert allocator.claim(300, [BlockPlace(long.places[0].slab + 3, 0)]) is None
        allocator.check_integrity()
