"""Where blocks lie, for every kind of layout."""

from __future__ import annotations

import pytest

from gpupoold.memory.kv_extents import KvGeometry, KvRow, in_whole_extents
from tests.unit.memory.rig import LAYOUTS, PAGE, geometry_of


def test_layers_outermost() -> None:
    geometry = geometry_of("layers-outermost")  # 3 layers of 16 blocks of half a page
    assert geometry.total_bytes == 3 * 16 * 2048
    assert geometry.num_pages == 24
    assert geometry.block_bytes == 3 * 2048
    assert (geometry.blocks_per_extent, geometry.num_extents) == (2, 8)
    assert geometry.pages(1) == [range(1, 2), range(9, 10), range(17, 18)]
    assert geometry.extents([2, 3, 5]) == [
        (4096, 4096),
        (10240, 2048),
        (4096 + 32768, 4096),
        (10240 + 32768, 2048),
        (4096 + 65536, 4096),
        (10240 + 65536, 2048),
    ]


def test_blocks_outermost() -> None:
    geometry = geometry_of("blocks-outermost")
    assert (geometry.blocks_per_extent, geometry.num_extents) == (1, 12)
    assert geometry.pages(11) == [range(33, 36)]
    assert geometry.extents([0, 1, 2]) == [(0, 9 * PAGE)]


def test_unaligned_strides() -> None:
    geometry = geometry_of("unaligned")  # 1500-byte blocks never fill whole pages
    assert (geometry.blocks_per_extent, geometry.num_extents) == (3, 4)
    assert list(geometry.blocks(3)) == [9, 10]
    assert geometry.pages(0) == [range(0, 2), range(4, 6)]
    assert geometry.pages(1) == [range(1, 3), range(5, 7)]


def test_hybrid_overlay_of_two_kinds_of_layer() -> None:
    # Both kinds see the same bytes through the same block ids: nothing is counted twice
    # on the device, and both rows travel.
    overlay = KvGeometry(8, PAGE, (KvRow(0, 2 * PAGE, 2 * PAGE), KvRow(0, 2 * PAGE, PAGE)))
    assert overlay.num_pages == 16
    assert overlay.pages(1) == [range(2, 4), range(2, 3)]
    hybrid = geometry_of("hybrid")
    assert hybrid.extents([0, 1]) == [(0, 12_000), (60_000, 1000), (66_000, 1000)]


def test_large_strides_take_a_extent_per_block() -> None:
    geometry = KvGeometry(4, PAGE, (KvRow(0, 33 * PAGE + 4, 33 * PAGE + 4),))
    assert (geometry.blocks_per_extent, geometry.num_extents) == (1, 4)


def test_long_alignment_gives_way() -> None:
    # 2040-byte blocks come out even after 512: an extent is then one page's worth.
    geometry = KvGeometry(600, PAGE, (KvRow(0, 2040, 2040),))
    assert geometry.blocks_per_extent == 3


def test_extents_of_one_page_in_each_row_are_aligned_whatever_their_blocks() -> None:
    """An 8B model with the pages of a GPU: 128 blocks of 64 KiB in each of 32 layers."""
    page_bytes, stride, num_layers = 8 << 20, 64 << 10, 32
    budget = in_whole_extents((6 << 30) + 5, page_bytes, [stride] * num_layers)
    assert budget == 6 << 30
    num_blocks = budget // (num_layers * stride)
    rows = tuple(KvRow(n * num_blocks * stride, stride, stride) for n in range(num_layers))
    geometry = KvGeometry(num_blocks, page_bytes, rows)
    assert geometry.is_aligned
    assert geometry.blocks_per_extent == 128
    assert sum(map(len, geometry.pages(1))) == num_layers


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_bytes", [512, 4096, 65536])
def test_extents_cover_every_block_and_byte_once(layout: str, page_bytes: int) -> None:
    geometry = geometry_of(layout, page_bytes)
    blocks = [b for extent in range(geometry.num_extents) for b in geometry.blocks(extent)]
    assert blocks == list(range(geometry.num_blocks))
    for extent in range(geometry.num_extents):
        pages = {page for span in geometry.pages(extent) for page in span}
        for offset, num_bytes in geometry.extents(list(geometry.blocks(extent))):
            assert offset + num_bytes <= geometry.total_bytes
            last = (offset + num_bytes - 1) // page_bytes
            assert set(range(offset // page_bytes, last + 1)) <= pages
        assert max(pages) < geometry.num_pages


@pytest.mark.parametrize("layout", LAYOUTS)
def test_extents_are_as_many_bytes_as_the_blocks(layout: str) -> None:
    geometry = geometry_of(layout)
    for blocks in ([], [1], [1, 2, 4], list(range(geometry.num_blocks))):
        sizes = [num_bytes for _, num_bytes in geometry.extents(blocks)]
        assert sum(sizes) == len(blocks) * geometry.block_bytes


@pytest.mark.parametrize(
    ("strides", "expected"),
    [
        ([PAGE // 4] * 3, 99 * PAGE),  # 4 blocks fill a page of each of 3 rows
        ([PAGE // 4, PAGE // 2], 99 * PAGE),
        ([2 * PAGE] * 3, 96 * PAGE),
        ([2040] * 3, 100 * PAGE),  # whole pages only after 512 blocks
        ([], 100 * PAGE),
    ],
)
def test_a_budget_in_whole_extents(strides: list[int], expected: int) -> None:
    assert in_whole_extents(100 * PAGE, PAGE, strides) == expected


@pytest.mark.parametrize("stride", [PAGE // 8, PAGE // 2 + PAGE // 4, 3 * PAGE])
def test_rows_of_such_a_budget_share_no_page(stride: int) -> None:
    num_layers = 5
    budget = in_whole_extents(1000 * PAGE + 123, PAGE, [stride] * num_layers)
    num_blocks = budget // (num_layers * stride)
    rows = tuple(KvRow(n * num_blocks * stride, stride, stride) for n in range(num_layers))
    assert KvGeometry(num_blocks, PAGE, rows).is_aligned
