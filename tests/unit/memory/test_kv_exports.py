"""KV memory: blocks that are copied for another device."""

from __future__ import annotations

import pytest

from gpupoold.memory.kv_extents import Place
from tests.unit.memory.kv_pair import (
    ORDERS,
    all_extents,
    backed,
    check,
    export,
    in_slot,
    open_later,
    row_by_row,
)
from tests.unit.memory.rig import LAYOUTS, Rig, read_block

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@every_layout
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("step_away", [None, 1, 2], ids=["here", "away", "some-away"])
def test_the_bytes_are_those_of_the_blocks(layout: str, order: str, step_away: int | None) -> None:
    rig = Rig(host_pages=96)
    kv, ledger, written = backed(rig, layout)
    if step_away is not None:
        away = [extent for extent in all_extents(kv) if kv.live_blocks(extent)][::step_away]
        assert kv.begin_page_out(away[::2], rig.outs) == len(away[::2])
        assert kv.begin_page_out(away[1::2], rig.outs) == len(away[1::2])
        rig.finish(kv)
        rig.soil()
    blocks = ORDERS[order](list(written))
    slot, transfer, told = export(rig, kv, blocks)
    transfer.wait()
    assert told == [True]
    assert in_slot(slot) == row_by_row(kv, written, blocks)
    kv.settle()
    assert [ledger.refs[block] for block in written] == [1] * len(written)
    slot.free()
    check(rig, kv)
    rig.close()


def test_blocks_are_kept_until_they_have_been_copied(rig: Rig) -> None:
    kv, ledger, written = backed(rig, "layers-outermost")
    blocks = [3, 2]  # all of extent 1
    with rig.copies_held():
        slot, transfer, told = export(rig, kv, blocks)
        ledger.release(blocks)
        kv.discard_dead()
        kv.settle()
        assert (ledger.num_free, kv.index.idle(), told) == (0, [], [])
        assert {block: read_block(kv, block) for block in blocks} == {
            block: written[block] for block in blocks
        }
    transfer.wait()
    assert (ledger.num_free, kv.index.idle()) == (0, [])  # until somebody takes note
    kv.settle()
    assert (ledger.num_free, kv.index.idle(), told) == (2, [1], [True])
    assert in_slot(slot) == row_by_row(kv, written, blocks)
    slot.free()
    check(rig, kv)


def test_blocks_on_the_host_are_kept_as_long(rig: Rig) -> None:
    kv, ledger, written = backed(rig, "layers-outermost")
    rig.page_out(kv, 1)
    used = rig.host.used_bytes
    with rig.copies_held():
        slot, transfer, _ = export(rig, kv, [2, 4])  # one there, one here
        ledger.release([2, 3, 4])
        kv.discard_dead()
        assert kv.index.extents(Place.HOST) == [1]
        check(rig, kv)
    transfer.wait()
    kv.settle_exports()
    assert (kv.index.extents(Place.HOST), kv.index.extents(Place.UNMAPPED)) == ([], [1])
    assert rig.host.used_bytes == used  # now of the copy
    assert in_slot(slot) == row_by_row(kv, written, [2, 4])
    slot.free()
    check(rig, kv)


def test_pages_stay_until_they_have_been_copied(rig: Rig) -> None:
    kv, ledger, written = backed(rig, "layers-outermost")
    rig.out_copy_stream.allow(0)
    slot, transfer, told = export(rig, kv, [2, 3])
    ledger.release([2, 3])
    open_later(rig.out_copy_stream)
    assert kv.begin_page_out([1, 2], rig.outs) == 2
    assert transfer.has_ended
    assert told == [True]
    rig.finish(kv)
    rig.soil()
    assert (kv.index.extents(Place.UNMAPPED), kv.index.extents(Place.HOST)) == ([1], [2])
    assert in_slot(slot) == row_by_row(kv, written, [2, 3])
    slot.free()
    check(rig, kv)


def test_a_copy_that_fails_is_told_to_who_waits_and_nobody_else(rig: Rig) -> None:
    kv, ledger, written = backed(rig, "layers-outermost")
    rig.out_copy_stream.error = OSError("the link is broken")
    slot, transfer, told = export(rig, kv, [2, 3])
    ledger.release([2, 3])
    with pytest.raises(OSError, match="the link is broken"):
        transfer.wait()
    kv.settle()
    kv.finish_exports()
    assert (told, ledger.num_free) == ([False], 2)
    assert read_block(kv, 4) == written[4]
    slot.free()
    check(rig, kv)


def test_no_room_on_the_host_changes_nothing() -> None:
    rig = Rig(host_pages=3)  # for two blocks of 6 KiB
    kv, ledger, _ = backed(rig, "layers-outermost")
    before = (list(ledger.refs), rig.pool.num_free, rig.host.used_bytes)
    told: list[bool] = []
    assert kv.export([2, 3, 4], rig.outs, told.append) is None
    kv.finish_exports()
    assert (list(ledger.refs), rig.pool.num_free, rig.host.used_bytes) == before
    assert told == []
    check(rig, kv)
    rig.close()


@pytest.mark.parametrize("leaving", [True, False])
def test_what_is_on_its_way_is_called_back(rig: Rig, leaving: bool) -> None:
    kv, _, written = backed(rig, "layers-outermost")
    if not leaving:
        for extent in (1, 2):
            rig.page_out(kv, extent)
    rig.in_copy_stream.allow(0)
    rig.out_copy_stream.allow(0)
    for extent in (1, 2):
        if leaving:
            kv.begin_page_out([extent], rig.outs)
        else:
            kv.begin_page_in([extent], rig.ins)
    # The first has been taken up by the thread, the second has not begun.
    open_later(rig.in_copy_stream)
    open_later(rig.out_copy_stream)
    slot, transfer, _ = export(rig, kv, [5, 2, 4, 3])
    transfer.wait()
    assert in_slot(slot) == row_by_row(kv, written, [5, 2, 4, 3])
    assert kv.index.extents(Place.LEAVING) == kv.index.extents(Place.ARRIVING) == []
    kv.settle()
    slot.free()
    check(rig, kv)


def test_the_same_blocks_for_two(rig: Rig) -> None:
    """Two requests that share a prefix leave one behind the other."""
    kv, ledger, written = backed(rig, "unaligned")
    with rig.copies_held():
        sent = [export(rig, kv, blocks) for blocks in ([1, 2, 3], [1, 2, 4])]
        ledger.release([1, 2, 3, 4])
        kv.settle()
        assert ledger.num_free == 0
    kv.finish_exports()
    assert ledger.num_free == 4
    for (slot, _, told), blocks in zip(sent, ([1, 2, 3], [1, 2, 4]), strict=True):
        assert told == [True]
        assert in_slot(slot) == row_by_row(kv, written, blocks)
        slot.free()
    check(rig, kv)


def test_a_model_that_goes_makes_its_copies_first(rig: Rig) -> None:
    kv, _, written = backed(rig, "layers-outermost")
    rig.out_copy_stream.allow(0)
    slot, transfer, told = export(rig, kv, [2, 3, 4])
    open_later(rig.out_copy_stream)
    kv.close()
    assert transfer.has_ended
    assert told == [True]
    rig.soil()
    assert in_slot(slot) == row_by_row(kv, written, [2, 3, 4])
    slot.free()
