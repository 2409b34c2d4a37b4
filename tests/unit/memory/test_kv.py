"""KV memory: backing, paging out and in, host copies of ended requests."""

from __future__ import annotations

import contextlib
import threading

import pytest

from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import KvGeometry, Place
from gpupoold.memory.pages import OutOfPages
from tests.unit.memory.ledger import MemoryLedger
from tests.unit.memory.rig import LAYOUTS, PAGE, Rig, fill_blocks, geometry_of, read_block

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def all_extents(kv: KvMemory) -> list[int]:
    return list(range(kv.geometry.num_extents))


def check(rig: Rig, *kvs: KvMemory) -> None:
    for kv in kvs:
        kv.check_integrity()
    rig.pool.check_integrity()
    rig.host.slabs.check_integrity()


@every_layout
def test_the_engine_gets_only_backed_blocks(rig: Rig, layout: str) -> None:
    kv, ledger = rig.kv(geometry_of(layout))
    assert (ledger.num_free, kv.resident_bytes) == (0, 0)
    assert kv.index.extents(Place.UNMAPPED) == all_extents(kv)
    kv.map([1, 2])
    backed = [*kv.geometry.blocks(1), *kv.geometry.blocks(2)]
    assert sorted(ledger.allocate(ledger.num_free)) == backed
    assert kv.index.extents(Place.DEVICE) == [1, 2]
    check(rig, kv)


@every_layout
def test_the_null_block_is_backed_but_never_given(rig: Rig, layout: str) -> None:
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    assert sorted(ledger.allocate(ledger.num_free)) == list(range(1, kv.geometry.num_blocks))
    assert read_block(kv, 0) == bytes(kv.geometry.block_bytes)


@every_layout
def test_fresh_blocks_are_zero(rig: Rig, layout: str) -> None:
    rig.soil()
    kv, _ = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    for block in range(kv.geometry.num_blocks):
        assert read_block(kv, block) == bytes(kv.geometry.block_bytes)


@every_layout
def test_predicted_pages_are_those_taken_and_freed(rig: Rig, layout: str) -> None:
    kv, _ = rig.kv(geometry_of(layout))
    for extents in ([1], [0, 2], [3]):
        predicted, before = kv.num_missing_pages(extents), rig.pool.num_free
        kv.map(extents)
        assert before - rig.pool.num_free == predicted
        assert kv.num_missing_pages(extents) == 0
    assert kv.resident_bytes == (64 - rig.pool.num_free) * PAGE
    for extents in ([1], [2, 3], [0]):
        predicted, before = kv.num_resident_pages(extents), rig.pool.num_free
        kv.unmap(extents)
        assert rig.pool.num_free - before == predicted
        check(rig, kv)


def test_a_extent_between_neighbours_frees_no_page(rig: Rig) -> None:
    kv, _ = rig.kv(geometry_of("unaligned"))
    kv.map([0, 1, 2])
    assert kv.num_resident_pages([1]) == 0
    assert kv.num_resident_pages([0, 1, 2]) == 64 - rig.pool.num_free


@every_layout
def test_out_and_in_again_at_other_pages(rig: Rig, layout: str) -> None:
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    live = ledger.allocate(ledger.num_free - 2)
    ledger.release(live[1::3])  # leaves gaps between live blocks
    del live[1::3]
    written = fill_blocks(kv, live, layout)
    num_live = {extent: len(kv.live_blocks(extent)) for extent in all_extents(kv)}
    for extent in all_extents(kv):
        before = kv.host_bytes
        assert rig.page_out(kv, extent)
        assert kv.host_bytes - before == num_live[extent] * kv.geometry.block_bytes
        check(rig, kv)
    assert (kv.resident_bytes, rig.pool.num_free) == (0, 64)
    assert kv.host_bytes == rig.host.used_bytes > 0
    rig.soil()
    for extent in reversed(kv.index.extents(Place.HOST)):
        rig.page_in(kv, extent)
        check(rig, kv)
    assert {block: read_block(kv, block) for block in live} == written
    assert rig.host.used_bytes == 0
    assert ledger.live(live) == live


@every_layout
def test_neighbours_stay_intact_while_a_extent_is_out(rig: Rig, layout: str) -> None:
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    written = fill_blocks(kv, ledger.allocate(ledger.num_free), "n")
    for extent in (extent for extent in all_extents(kv) if kv.live_blocks(extent)):
        rig.page_out(kv, extent)
        assert kv.index.extents(Place.HOST) == [extent]
        there = [b for c in kv.index.extents(Place.DEVICE) for b in kv.live_blocks(c)]
        assert all(read_block(kv, block) == written[block] for block in there)
        rig.soil()
        rig.page_in(kv, extent)
        assert {block: read_block(kv, block) for block in written} == written


def test_blocks_that_do_not_travel_show_nothing_of_another_model(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    live = ledger.allocate(1)
    written = fill_blocks(kv, live, "x")
    rig.page_out(kv, 1)
    rig.soil()
    rig.page_in(kv, 1)
    (idle,) = set(kv.geometry.blocks(1)) - set(live)
    assert read_block(kv, live[0]) == written[live[0]]
    assert read_block(kv, idle) == bytes(kv.geometry.block_bytes)


def test_free_extents_are_those_without_a_live_block(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([0, 1, 2, 3])
    assert kv.index.idle() == [3, 2, 1, 0]
    blocks = ledger.allocate(2)  # block 1 in extent 0, block 2 in extent 1
    assert kv.index.idle() == [3, 2]
    ledger.release(blocks[:1])
    assert kv.index.idle() == [3, 2, 0]
    kv.unmap([3, 0])
    assert kv.index.extents(Place.DEVICE) == [1, 2]
    check(rig, kv)


def test_unback_forgets_cached_prefixes(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    block = ledger.allocate(1)[0]
    ledger.remember(block, "prefix")
    ledger.release([block])
    kv.unmap([1])
    assert ledger.reuse("prefix") is None
    kv.map([1])
    assert ledger.num_free == 2


def test_page_out_forgets_prefixes_of_free_blocks_only(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    live, idle = ledger.allocate(2)
    ledger.remember(live, "live")
    ledger.remember(idle, "idle")
    ledger.release([idle])
    rig.page_out(kv, 1)
    assert ledger.cached() == {"live": live}


def test_blocks_of_a_request_that_ended_outside_stay_with_us(rig: Rig) -> None:
    """Else the engine could write to a block that a copy is about to fill."""
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    blocks = ledger.allocate(2)
    written = fill_blocks(kv, blocks, "p")
    ledger.remember(blocks[0], "prefix")
    rig.page_out(kv, 1)
    ledger.release(blocks[:1])
    assert ledger.num_free == 1
    kv.discard_dead()
    assert kv.index.extents(Place.HOST) == [1]  # the other block is still live
    assert (ledger.num_free, ledger.reuse("prefix")) == (0, None)
    check(rig, kv)
    rig.soil()
    rig.page_in(kv, 1)
    assert ledger.num_free == 1
    assert read_block(kv, blocks[1]) == written[blocks[1]]


def test_discard_dead_frees_the_host_and_holds_the_blocks(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    blocks = ledger.allocate(4)
    ledger.remember(blocks[0], "prefix")
    for extent in (1, 2):
        rig.page_out(kv, extent)
    ledger.release(blocks[:2])
    kv.discard_dead()
    assert (kv.index.extents(Place.UNMAPPED)[:2], kv.index.extents(Place.HOST)) == ([0, 1], [2])
    assert ledger.num_free == 0
    assert ledger.reuse("prefix") is None
    ledger.release(blocks[2:])
    kv.discard_dead()
    assert rig.host.used_bytes == 0
    kv.map([1])
    assert ledger.num_free == 2
    check(rig, kv)


def test_host_cache_full_changes_nothing() -> None:
    rig = Rig(host_pages=1)
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    written = fill_blocks(kv, ledger.allocate(4), "f")
    before = rig.pool.num_free
    assert not rig.page_out(kv, 1)
    assert kv.index.extents(Place.DEVICE) == [1, 2]
    assert (rig.pool.num_free, rig.host.used_bytes) == (before, 0)
    assert {block: read_block(kv, block) for block in written} == written
    check(rig, kv)
    rig.close()


def test_a_extent_without_live_blocks_needs_no_host_room() -> None:
    rig = Rig(host_pages=0)
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    assert rig.page_out(kv, 1)
    assert rig.pool.num_free == 64
    assert kv.index.extents(Place.HOST) == []
    assert ledger.num_free == 0
    rig.close()


@every_layout
def test_no_pages_to_come_back_to_changes_nothing(rig: Rig, layout: str) -> None:
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map([1, 2])
    written = fill_blocks(kv, ledger.allocate(ledger.num_free), "d")
    rig.page_out(kv, 2)
    other = rig.address_range(64)
    other.retain(range(rig.pool.num_free - kv.num_missing_pages([2]) + 1))
    before = (rig.pool.num_free, rig.host.used_bytes)
    with pytest.raises(OutOfPages):
        rig.page_in(kv, 2)
    assert (rig.pool.num_free, rig.host.used_bytes) == before
    assert kv.index.extents(Place.HOST) == [2]
    check(rig, kv)
    other.drop(range(other.num_mapped))
    rig.page_in(kv, 2)
    assert {block: read_block(kv, block) for block in written} == written


def test_no_pages_to_back_with_changes_nothing(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))  # three pages per extent
    rig.address_range(64).retain(range(64 - 7))
    with pytest.raises(OutOfPages):
        kv.map([1, 2, 3])
    assert kv.index.extents(Place.DEVICE) == []
    assert (ledger.num_free, rig.pool.num_free) == (0, 7)
    check(rig, kv)


def test_two_models_take_turns_on_a_full_device() -> None:
    rig = Rig(num_pages=24)
    models = [rig.kv(geometry_of("layers-outermost")) for _ in range(2)]
    written: list[dict[int, bytes]] = []
    for number, (kv, ledger) in enumerate(models):
        kv.map(all_extents(kv))
        written.append(fill_blocks(kv, ledger.allocate(15), number))
        for extent in all_extents(kv):
            rig.page_out(kv, extent)
    for turn in range(4):
        kv, _ = models[turn % 2]
        for extent in kv.index.extents(Place.HOST):
            rig.page_in(kv, extent)
        assert {b: read_block(kv, b) for b in written[turn % 2]} == written[turn % 2]
        for extent in kv.index.extents(Place.DEVICE):
            rig.page_out(kv, extent)
    rig.close()


def test_unattached_memory_says_so(rig: Rig) -> None:
    geometry = geometry_of("layers-outermost")
    address_range = rig.address_range(geometry.num_pages)
    kv = KvMemory(geometry, address_range, rig.device, rig.host)
    with pytest.raises(AssertionError, match="attach"):
        kv.live_blocks(0)


def test_close_frees_host_slots(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    ledger.allocate(2)
    rig.page_out(kv, 1)
    assert rig.host.used_bytes > 0
    # The fixture closes and checks that nothing is left.


def test_ledger_refuses_to_hold_a_block_in_use() -> None:
    ledger = MemoryLedger(3)
    blocks = ledger.allocate(1)
    with pytest.raises(AssertionError, match="in use"):
        ledger.hold(blocks)


def test_a_extent_on_its_way_out_is_whole_until_it_is_out(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    live = ledger.allocate(1)
    written = fill_blocks(kv, live, "x")
    with rig.copies_held():
        kv.begin_page_out([1], rig.outs)
        kv.settle()
        assert kv.index.extents(Place.LEAVING) == [1]
        assert kv.num_leaving_pages == 3
        assert not kv.is_on_device(live)
        assert ledger.num_free == 0
        assert read_block(kv, live[0]) == written[live[0]]
        check(rig, kv)
    rig.finish(kv)
    assert (kv.index.extents(Place.HOST), kv.resident_bytes) == ([1], 0)


def test_what_was_leaving_stays_when_it_is_wanted_again(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    written = fill_blocks(kv, ledger.allocate(3), "x")
    with rig.copies_held():
        kv.begin_page_out([1], rig.outs)
        kv.begin_page_out([2], rig.outs)
        # The first has been taken up by the thread, the second has not begun.
        threading.Timer(0.02, rig.out_copy_stream.allow).start()
        kv.stop(Place.LEAVING)
    assert kv.index.extents(Place.DEVICE) == [1, 2]
    assert kv.is_whole
    assert ledger.num_free == 1
    assert rig.host.used_bytes == 0
    assert {block: read_block(kv, block) for block in written} == written
    check(rig, kv)


def test_a_request_may_run_when_its_own_kv_is_in(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    first, second = ledger.allocate(2), ledger.allocate(2)
    fill_blocks(kv, [*first, *second], "x")
    for extent in (1, 2):
        rig.page_out(kv, extent)
    assert not kv.is_on_device(first)
    assert kv.extents_in_order(Place.HOST, second) == [2, 1]
    rig.page_in(kv, 2)
    assert kv.is_on_device(second)
    assert not kv.is_on_device(first)
    with rig.copies_held():
        kv.begin_page_in([1], rig.ins)
        kv.settle()
        assert not kv.is_on_device(first)
        assert kv.missing_bytes == 0  # it is on its way
    rig.finish(kv)
    assert kv.is_on_device(first)
    assert kv.is_whole


def test_what_was_arriving_stays_on_the_host_when_plans_change(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2])
    written = fill_blocks(kv, ledger.allocate(4), "x")
    for extent in (1, 2):
        rig.page_out(kv, extent)
    rig.soil()
    with rig.copies_held():
        kv.begin_page_in([1], rig.ins)
        kv.begin_page_in([2], rig.ins)
        threading.Timer(0.02, rig.in_copy_stream.allow).start()
        kv.stop(Place.ARRIVING)
    assert 2 in kv.index.extents(Place.HOST)
    check(rig, kv)
    for extent in kv.index.extents(Place.HOST):
        rig.page_in(kv, extent)
    assert {block: read_block(kv, block) for block in written} == written


@pytest.mark.parametrize("leaving", [True, False])
def test_a_extent_whose_requests_end_under_way_is_let_go_when_it_has_come(
    rig: Rig, leaving: bool
) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    blocks = ledger.allocate(2)
    fill_blocks(kv, blocks, "x")
    if not leaving:
        rig.page_out(kv, 1)
    rig.soil()
    with rig.copies_held():
        if leaving:
            kv.begin_page_out([1], rig.outs)
        else:
            kv.begin_page_in([1], rig.ins)
        ledger.release(blocks)
        kv.discard_dead()
        assert ledger.num_free == 0  # a copy may still touch them
        check(rig, kv)
    rig.finish(kv)
    assert kv.is_whole
    assert rig.host.used_bytes == 0
    assert kv.index.extents(Place.DEVICE) == ([] if leaving else [1])
    assert ledger.num_free == (0 if leaving else 2)
    check(rig, kv)


@every_layout
def test_neighbours_move_together(rig: Rig, layout: str) -> None:
    """Mapped in one go where they meet, and apart where pages of others lie between."""
    kv, ledger = rig.kv(geometry_of(layout))
    kv.map(all_extents(kv))
    written = fill_blocks(kv, ledger.allocate(ledger.num_free), layout)
    extents = [extent for extent in all_extents(kv) if kv.live_blocks(extent)]
    for group in (extents, extents[::2], extents[1:3]):
        assert kv.begin_page_out(group, rig.outs) == len(group)
        rig.finish(kv)
        check(rig, kv)
        rig.soil()
        assert list(kv.groups_on_host([])) == [group]
        kv.begin_page_in([group[-1]], rig.ins)
        rig.finish(kv)
        check(rig, kv)
        assert {block: read_block(kv, block) for block in written} == written


@pytest.mark.parametrize(
    ("num_extents", "sizes"), [(0, []), (1, [1]), (2, [1, 1]), (5, [2, 2, 1]), (16, [2] * 8)]
)
def test_groups_are_alike_and_even_in_number_where_they_can_be(
    rig: Rig, num_extents: int, sizes: list[int]
) -> None:
    """A group has at most an eighth of the KV: of 16 extents two."""
    per_extent = geometry_of("blocks-outermost").blocks_per_extent
    rows = LAYOUTS["blocks-outermost"][1]
    kv, _ = rig.kv(KvGeometry(16 * per_extent, PAGE, rows))
    assert [len(group) for group in kv.cut(list(range(num_extents)))] == sizes


def test_what_the_host_has_no_room_for_stays() -> None:
    rig = Rig(host_pages=3)  # for two blocks of 6 KiB
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1, 2, 3])
    blocks = ledger.allocate(6)
    fill_blocks(kv, blocks, "x")
    ledger.release([6, 7])  # all of extent 3
    with rig.copies_held():
        assert kv.begin_page_out([3, 1, 2], rig.outs) == 2
        assert (kv.index.extents(Place.LEAVING), kv.index.extents(Place.DEVICE)) == ([1], [2])
        assert 3 in kv.index.extents(Place.UNMAPPED)
    rig.finish(kv)
    check(rig, kv)
    rig.close()


def test_a_copy_that_fails_leaves_the_extent_where_it_was(rig: Rig) -> None:
    kv, ledger = rig.kv(geometry_of("layers-outermost"))
    kv.map([1])
    written = fill_blocks(kv, ledger.allocate(2), "x")
    rig.out_copy_stream.error = OSError("the link is broken")
    with pytest.raises(OSError, match="the link is broken"):
        rig.page_out(kv, 1)
    with contextlib.suppress(OSError):
        kv.settle()
    assert kv.index.extents(Place.DEVICE) == [1]
    check(rig, kv)
    rig.page_out(kv, 1)
    rig.soil()
    rig.in_copy_stream.error = OSError("the link is broken")
    with pytest.raises(OSError, match="the link is broken"):
        rig.page_in(kv, 1)
    with contextlib.suppress(OSError):
        kv.settle()
    assert kv.index.extents(Place.HOST) == [1]
    check(rig, kv)
    rig.page_in(kv, 1)
    assert {block: read_block(kv, block) for block in written} == written
