"""The page pool, and address ranges: holders of shared pages, zeroed pages, failures."""

from __future__ import annotations

import pytest

from gpupoold.memory.device import AddressRange, FillTime
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import OutOfPages, PagePool, PageRun, split_runs
from tests.unit.memory.rig import PAGE, Rig, pattern, read, write


def test_fresh_pool_gives_one_run() -> None:
    pool = PagePool(8)
    assert pool.allocate(5) == [PageRun(0, 5)]
    assert pool.num_free == 3
    pool.check_integrity()


def test_smallest_run_that_fits_is_taken() -> None:
    pool = pool_with_holes()  # free: 1 page at 1, 3 pages at 4, 2 pages at 8
    assert pool.allocate(2) == [PageRun(8, 2)]
    assert pool.allocate(1) == [PageRun(1, 1)]


def test_without_a_fitting_run_the_largest_go_first() -> None:
    pool = pool_with_holes()
    assert pool.allocate(5) == [PageRun(4, 3), PageRun(8, 2)]
    assert pool.num_free == 1
    pool.check_integrity()


class TestPageTables:
    """Runs that lie in tables of four pages as the address range's pages that they are mapped
    to."""

    @pytest.mark.parametrize(("at", "first"), [(0, 0), (1, 1), (7, 3), (8, 0)])
    def test_a_run_begins_where_its_addresses_begin_in_their_table(
        self, at: int, first: int
    ) -> None:
        pool = PagePool(16, table_pages=4)
        assert pool.allocate(6, at) == [PageRun(first, 6)]
        assert pool.num_free == 10
        pool.check_integrity()
        pool.free([PageRun(first, 6)])
        assert pool.allocate(16) == [PageRun(0, 16)]

    def test_the_smallest_run_that_has_such_a_place_is_taken(self) -> None:
        pool = PagePool(40, table_pages=4)
        pool.allocate(40)
        pool.free([PageRun(1, 4), PageRun(9, 9), PageRun(24, 12)])
        assert pool.allocate(4, 2) == [PageRun(10, 4)]  # page 1 + 4 pages have no room from 2 on
        pool.check_integrity()

    def test_less_than_a_table_is_taken_where_it_fits_best(self) -> None:
        pool = PagePool(16, table_pages=4)
        assert pool.allocate(3, 1) == [PageRun(0, 3)]

    def test_without_such_a_place_any_will_do(self) -> None:
        pool = PagePool(8, table_pages=4)
        assert pool.allocate(8, 1) == [PageRun(0, 8)]


def test_too_many_pages_take_nothing() -> None:
    pool = pool_with_holes()
    with pytest.raises(OutOfPages, match="7 pages requested, 6 of 10 free"):
        pool.allocate(7)
    assert pool.num_free == 6
    pool.check_integrity()


def test_nothing_asked_nothing_taken() -> None:
    pool = PagePool(0)
    assert pool.allocate(0) == []
    pool.check_integrity()
    with pytest.raises(OutOfPages):
        pool.allocate(1)


def test_one_run_is_the_smallest_that_is_long_enough() -> None:
    pool = pool_with_holes()
    assert pool.num_runs(2) == 2
    assert pool.allocate_run(2) == PageRun(8, 2)
    assert pool.allocate_run(2) == PageRun(4, 2)
    assert pool.num_runs(2) == 0
    pool.check_integrity()


def test_runs_that_are_too_short_are_left_alone() -> None:
    pool = pool_with_holes()
    assert pool.num_runs(4) == 0
    assert pool.allocate_run(4) is None
    assert pool.num_free == 6
    assert PagePool(0).allocate_run(1) is None
    pool.check_integrity()


@pytest.mark.parametrize("num_pages", [1, 2, 3, 4, 7, 30, 31])
def test_as_many_runs_as_it_says(num_pages: int) -> None:
    pool = PagePool(64)
    pool.allocate(64)
    pool.free([PageRun(0, 7), PageRun(10, 3), PageRun(20, 30), PageRun(60, 4)])
    num_runs = pool.num_runs(num_pages)
    assert num_runs == 7 // num_pages + 3 // num_pages + 30 // num_pages + 4 // num_pages
    for _ in range(num_runs):
        assert pool.allocate_run(num_pages) is not None
    assert pool.allocate_run(num_pages) is None
    assert pool.num_free == 44 - num_runs * num_pages
    pool.check_integrity()


def test_freed_neighbours_are_joined() -> None:
    pool = PagePool(6)
    pages = [pool.allocate(1)[0] for _ in range(6)]
    for page in (pages[1], pages[4], pages[2], pages[0], pages[5], pages[3]):
        pool.free([page])
        pool.check_integrity()
    assert pool.allocate(6) == [PageRun(0, 6)]


@pytest.mark.parametrize(
    "run", [PageRun(1, 1), PageRun(0, 2), PageRun(3, 2), PageRun(3, 1), PageRun(9, 2)]
)
def test_double_free_changes_nothing(run: PageRun) -> None:
    pool = PagePool(10)
    pool.allocate(10)
    pool.free([PageRun(1, 1), PageRun(4, 3)])
    if run == PageRun(3, 1):
        pool.free([run])
    free = pool.num_free
    with pytest.raises(ValueError, match="double free"):
        pool.free([run])
    assert pool.num_free == free
    pool.check_integrity()


def test_split_runs_anywhere() -> None:
    runs = [PageRun(0, 2), PageRun(5, 3)]
    assert split_runs(runs, 0) == ([], runs)
    assert split_runs(runs, 1) == ([PageRun(0, 1)], [PageRun(1, 1), PageRun(5, 3)])
    assert split_runs(runs, 2) == ([PageRun(0, 2)], [PageRun(5, 3)])
    assert split_runs(runs, 4) == ([PageRun(0, 2), PageRun(5, 2)], [PageRun(7, 1)])
    assert split_runs(runs, 5) == (runs, [])


def test_page_run_end() -> None:
    assert PageRun(3, 4).end == 7


def test_map_share() -> None:
    before = FillTime(1.0, 1.0)
    assert FillTime(2.0, 4.0).map_share_since(before) == 0.25
    assert FillTime(1.0, 1.0).map_share_since(before) == 0.0


def pool_with_holes() -> PagePool:
    pool = PagePool(10)
    pool.allocate(10)
    pool.free([PageRun(1, 1), PageRun(4, 3), PageRun(8, 2)])
    return pool


def test_every_page_has_one_owner() -> None:
    pool = PagePool(6)
    [run] = pool.allocate(2)
    pool.check_owned([run.first, run.first + 1])
    for wrong in ([run.first], [run.first, run.first], [run.first, run.first + 1, 5]):
        with pytest.raises(AssertionError, match="two owners or none"):
            pool.check_owned(wrong)


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
