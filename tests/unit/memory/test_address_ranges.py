"""Regions: holders of shared pages, zeroed pages, nothing changed by a failure."""

from __future__ import annotations

import pytest

from gpupoold.memory.address_ranges import Region
from gpupoold.memory.contracts import OutOfPages
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.rig import PAGE, Rig, pattern, read, write


def test_fresh_pages_show_nothing_of_another_model(rig: Rig) -> None:
    rig.soil()
    region = rig.region(8)
    region.retain(range(2, 7))
    assert read(region.address + 2 * PAGE, 5 * PAGE) == bytes(5 * PAGE)


def test_pages_come_and_go_one_by_one(rig: Rig) -> None:
    region = rig.region(8)
    assert region.num_missing(range(8)) == 8
    region.retain(range(2, 5))
    assert (region.num_mapped, rig.pool.num_free) == (3, 61)
    assert region.num_missing(range(8)) == 5
    region.drop(range(3, 4))
    assert (region.num_mapped, rig.pool.num_free) == (2, 62)
    region.check_integrity()
    region.drop(range(2, 3))
    region.drop(range(4, 5))
    assert (region.num_mapped, rig.pool.num_free) == (0, 64)


def test_shared_page_stays_until_its_last_holder_goes(rig: Rig) -> None:
    region = rig.region(4)
    region.retain(range(0, 2))
    write(region.address, pattern("shared", 2 * PAGE))
    region.retain(range(1, 3))
    assert region.num_mapped == 3
    assert [region.num_holders(page) for page in range(4)] == [1, 2, 1, 0]
    assert read(region.address + 2 * PAGE, PAGE) == bytes(PAGE)
    region.drop(range(0, 2))
    assert region.num_mapped == 2
    assert read(region.address + PAGE, PAGE) == pattern("shared", 2 * PAGE)[PAGE:]
    region.drop(range(1, 3))
    region.check_integrity()


def test_ranges_that_share_a_page_are_dropped_together(rig: Rig) -> None:
    region = rig.region(8)
    for pages in (range(0, 3), range(2, 5), range(6, 7)):
        region.retain(pages)
    region.drop_each([range(0, 3), range(2, 4)])
    assert [page for page in range(8) if region.num_holders(page)] == [4, 6]
    assert (region.num_mapped, rig.pool.num_free) == (2, 62)
    region.check_integrity()
    region.drop_each([])
    region.drop_each([range(4, 5), range(6, 7)])
    assert rig.pool.num_free == 64


def test_filled_from_the_right_place_when_some_pages_are_mapped(rig: Rig) -> None:
    region = rig.region(6)
    region.retain(range(2, 3))
    write(region.address + 2 * PAGE, b"\x05" * PAGE)
    source = HostBuffer.create("source", 5 * PAGE)
    data = pattern("source", 5 * PAGE)
    write(source.address, data)
    region.retain(range(1, 6), source.address)
    assert read(region.address + PAGE, PAGE) == data[:PAGE]
    assert read(region.address + 2 * PAGE, PAGE) == b"\x05" * PAGE
    assert read(region.address + 3 * PAGE, 3 * PAGE) == data[2 * PAGE :]
    source.close()


def test_out_of_pages_changes_nothing(rig: Rig) -> None:
    region, other = rig.region(8), rig.region(60)
    other.retain(range(60))
    region.retain(range(1, 3))
    before = rig.pool.num_free
    with pytest.raises(OutOfPages):
        region.retain(range(0, 8))
    assert (rig.pool.num_free, region.num_mapped) == (before, 2)
    assert [region.num_holders(page) for page in range(4)] == [0, 1, 1, 0]
    region.check_integrity()


@pytest.mark.parametrize("fail_in", [1, 2])
def test_device_error_changes_nothing(rig: Rig, fail_in: int) -> None:
    region = rig.region(8)
    region.retain(range(3, 4))  # splits the range in two fills
    write(region.address + 3 * PAGE, b"\x07" * PAGE)
    rig.device.fail_in = fail_in
    with pytest.raises(OSError, match="too many mappings"):
        region.retain(range(8))
    assert (region.num_mapped, rig.pool.num_free) == (1, 63)
    region.check_integrity()
    rig.pool.check_integrity()
    region.retain(range(8))
    assert read(region.address, 3 * PAGE) == bytes(3 * PAGE)
    assert read(region.address + 3 * PAGE, PAGE) == b"\x07" * PAGE
    assert read(region.address + 4 * PAGE, 4 * PAGE) == bytes(4 * PAGE)


def test_dropping_what_is_not_held_changes_nothing(rig: Rig) -> None:
    region = rig.region(4)
    region.retain(range(0, 2))
    with pytest.raises(ValueError, match="not all held"):
        region.drop(range(0, 3))
    assert region.num_mapped == 2
    region.check_integrity()


def test_fragmented_pages_are_mapped_in_order(rig: Rig) -> None:
    holes = rig.region(64)
    holes.retain(range(64))
    for page in range(0, 64, 2):
        holes.drop(range(page, page + 1))
    region = rig.region(20)
    source = HostBuffer.create("source", 20 * PAGE)
    data = pattern("frag", 20 * PAGE)
    write(source.address, data)
    region.retain(range(20), source.address)
    assert read(region.address, 20 * PAGE) == data
    region.check_integrity()
    source.close()


def test_close_gives_everything_back(rig: Rig) -> None:
    region = Region(rig.device, rig.pool, 8)
    region.retain(range(0, 3))
    region.retain(range(2, 5))
    region.retain(range(7, 8))
    region.close()
    assert rig.pool.num_free == 64
    rig.pool.check_integrity()
