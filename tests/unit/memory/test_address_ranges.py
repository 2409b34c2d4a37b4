"""Address ranges: holders of shared pages, zeroed pages, nothing changed by a failure."""

from __future__ import annotations

import pytest

from gpupoold.memory.device import AddressRange, OutOfPages
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.rig import PAGE, Rig, pattern, read, write


def test_fresh_pages_show_nothing_of_another_model(rig: Rig) -> None:
    rig.soil()
    address_range = rig.address_range(8)
    address_range.retain(range(2, 7))
    assert read(address_range.address + 2 * PAGE, 5 * PAGE) == bytes(5 * PAGE)


def test_pages_come_and_go_one_by_one(rig: Rig) -> None:
    address_range = rig.address_range(8)
    assert address_range.num_missing(range(8)) == 8
    address_range.retain(range(2, 5))
    assert (address_range.num_mapped, rig.pool.num_free) == (3, 61)
    assert address_range.num_missing(range(8)) == 5
    address_range.drop(range(3, 4))
    assert (address_range.num_mapped, rig.pool.num_free) == (2, 62)
    address_range.check_integrity()
    address_range.drop(range(2, 3))
    address_range.drop(range(4, 5))
    assert (address_range.num_mapped, rig.pool.num_free) == (0, 64)


def test_shared_page_stays_until_its_last_holder_goes(rig: Rig) -> None:
    address_range = rig.address_range(4)
    address_range.retain(range(0, 2))
    write(address_range.address, pattern("shared", 2 * PAGE))
    address_range.retain(range(1, 3))
    assert address_range.num_mapped == 3
    assert [address_range.num_holders(page) for page in range(4)] == [1, 2, 1, 0]
    assert read(address_range.address + 2 * PAGE, PAGE) == bytes(PAGE)
    address_range.drop(range(0, 2))
    assert address_range.num_mapped == 2
    assert read(address_range.address + PAGE, PAGE) == pattern("shared", 2 * PAGE)[PAGE:]
    address_range.drop(range(1, 3))
    address_range.check_integrity()


def test_ranges_that_share_a_page_are_dropped_together(rig: Rig) -> None:
    address_range = rig.address_range(8)
    for pages in (range(0, 3), range(2, 5), range(6, 7)):
        address_range.retain(pages)
    address_range.drop_each([range(0, 3), range(2, 4)])
    assert [page for page in range(8) if address_range.num_holders(page)] == [4, 6]
    assert (address_range.num_mapped, rig.pool.num_free) == (2, 62)
    address_range.check_integrity()
    address_range.drop_each([])
    address_range.drop_each([range(4, 5), range(6, 7)])
    assert rig.pool.num_free == 64


def test_filled_from_the_right_place_when_some_pages_are_mapped(rig: Rig) -> None:
    address_range = rig.address_range(6)
    address_range.retain(range(2, 3))
    write(address_range.address + 2 * PAGE, b"\x05" * PAGE)
    source = HostBuffer.create("source", 5 * PAGE)
    data = pattern("source", 5 * PAGE)
    write(source.address, data)
    address_range.retain(range(1, 6), source.address)
    assert read(address_range.address + PAGE, PAGE) == data[:PAGE]
    assert read(address_range.address + 2 * PAGE, PAGE) == b"\x05" * PAGE
    assert read(address_range.address + 3 * PAGE, 3 * PAGE) == data[2 * PAGE :]
    source.close()


def test_out_of_pages_changes_nothing(rig: Rig) -> None:
    address_range, other = rig.address_range(8), rig.address_range(60)
    other.retain(range(60))
    address_range.retain(range(1, 3))
    before = rig.pool.num_free
    with pytest.raises(OutOfPages):
        address_range.retain(range(0, 8))
    assert (rig.pool.num_free, address_range.num_mapped) == (before, 2)
    assert [address_range.num_holders(page) for page in range(4)] == [0, 1, 1, 0]
    address_range.check_integrity()


@pytest.mark.parametrize("fail_in", [1, 2])
def test_device_error_changes_nothing(rig: Rig, fail_in: int) -> None:
    address_range = rig.address_range(8)
    address_range.retain(range(3, 4))  # splits the range in two fills
    write(address_range.address + 3 * PAGE, b"\x07" * PAGE)
    rig.device.fail_in = fail_in
    with pytest.raises(OSError, match="too many mappings"):
        address_range.retain(range(8))
    assert (address_range.num_mapped, rig.pool.num_free) == (1, 63)
    address_range.check_integrity()
    rig.pool.check_integrity()
    address_range.retain(range(8))
    assert read(address_range.address, 3 * PAGE) == bytes(3 * PAGE)
    assert read(address_range.address + 3 * PAGE, PAGE) == b"\x07" * PAGE
    assert read(address_range.address + 4 * PAGE, 4 * PAGE) == bytes(4 * PAGE)


def test_dropping_what_is_not_held_changes_nothing(rig: Rig) -> None:
    address_range = rig.address_range(4)
    address_range.retain(range(0, 2))
    with pytest.raises(ValueError, match="not all held"):
        address_range.drop(range(0, 3))
    assert address_range.num_mapped == 2
    address_range.check_integrity()


def test_fragmented_pages_are_mapped_in_order(rig: Rig) -> None:
    holes = rig.address_range(64)
    holes.retain(range(64))
    for page in range(0, 64, 2):
        holes.drop(range(page, page + 1))
    address_range = rig.address_range(20)
    source = HostBuffer.create("source", 20 * PAGE)
    data = pattern("frag", 20 * PAGE)
    write(source.address, data)
    address_range.retain(range(20), source.address)
    assert read(address_range.address, 20 * PAGE) == data
    address_range.check_integrity()
    source.close()


def test_close_gives_everything_back(rig: Rig) -> None:
    address_range = AddressRange(rig.device, rig.pool, 8)
    address_range.retain(range(0, 3))
    address_range.retain(range(2, 5))
    address_range.retain(range(7, 8))
    address_range.close()
    assert rig.pool.num_free == 64
    rig.pool.check_integrity()
