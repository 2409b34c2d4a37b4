"""KV memory: blocks whose bytes come from another device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from gpupoold.memory.kv_extents import Place
from tests.unit.memory.kv_pair import (
    ORDERS,
    Pair,
    all_extents,
    backed,
    check,
    export,
    in_slot,
    open_later,
    row_by_row,
)
from tests.unit.memory.rig import LAYOUTS, Rig, fill_blocks, geometry_of, read_block

every_layout = pytest.mark.parametrize("layout", LAYOUTS)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair("layers-outermost")
    yield made
    made.close()


@every_layout
@pytest.mark.parametrize("order", ORDERS)
def test_bytes_are_those_that_were_exported(layout: str, order: str) -> None:
    pair = Pair(layout)
    blocks = ORDERS[order](list(pair.written))
    attached = pair.attach_slot(blocks)
    num_bytes = len(blocks) * pair.kv.geometry.block_bytes
    assert pair.kv.host_bytes == pair.kv.peer_host_bytes == pair.kv.missing_bytes == num_bytes
    assert pair.target.host.used_bytes == 0
    assert not pair.kv.is_on_device(attached)
    assert pair.num_freed == 0
    pair.bring_in()
    assert pair.kv.is_on_device(attached)
    assert pair.num_freed == 1
    assert pair.kv.peer_host_bytes == pair.kv.host_bytes == 0
    assert [read_block(pair.kv, block) for block in attached] == [
        pair.written[block] for block in blocks
    ]
    assert [pair.ledger.refs[block] for block in attached] == [1] * len(attached)
    pair.close()


@every_layout
def test_beside_others_and_out_again(layout: str) -> None:
    """As blocks that were always here: their neighbours stay intact, they can be paged."""
    pair = Pair(layout)
    pair.kv.map([0, 1])
    own = fill_blocks(pair.kv, pair.ledger.allocate(pair.ledger.num_free), "own")
    blocks = list(pair.written)[: len(pair.written) // 3]
    attached = pair.attach_slot(blocks)
    pair.bring_in()
    expected = own | dict(zip(attached, (pair.written[one] for one in blocks), strict=True))
    assert {block: read_block(pair.kv, block) for block in expected} == expected
    for extent in pair.kv.index.extents(Place.DEVICE):
        pair.target.page_out(pair.kv, extent)
    assert (pair.kv.resident_bytes, pair.kv.peer_host_bytes) == (0, 0)
    pair.bring_in()
    assert {block: read_block(pair.kv, block) for block in expected} == expected
    pair.close()


def test_the_rest_of_their_extents_is_held_until_they_are_in(pair: Pair) -> None:
    assert pair.attach_slot([4]) == [2]  # block 3 comes along
    assert pair.ledger.num_free == 0
    pair.bring_in()
    assert pair.ledger.allocate(pair.ledger.num_free) == [3]
    assert read_block(pair.kv, 3) == bytes(pair.kv.geometry.block_bytes)


def test_cached_prefixes_give_way(pair: Pair) -> None:
    pair.kv.map(all_extents(pair.kv))
    mine = pair.ledger.allocate(3)
    own = fill_blocks(pair.kv, mine, "own")
    cached = pair.ledger.allocate(2)
    for block in cached:
        pair.ledger.remember(block, f"prefix {block}")
    pair.ledger.release(cached)
    blocks = list(pair.written)[:12]
    attached = pair.attach_slot(blocks)
    assert not set(attached) & set(mine)
    pair.bring_in()
    assert [read_block(pair.kv, one) for one in attached] == [pair.written[b] for b in blocks]
    assert {block: read_block(pair.kv, block) for block in own} == own
    assert pair.ledger.cached() == {}


def test_more_than_fit_are_not_taken(pair: Pair) -> None:
    pair.kv.map([1, 2])
    own = fill_blocks(pair.kv, pair.ledger.allocate(4), "own")
    num_room = len(pair.written) - 4
    slot = pair.kv_transfer(list(pair.written)[: num_room + 1])
    refs, mapped = list(pair.ledger.refs), pair.target.pool.num_free
    assert pair.kv.attach_slot(slot, num_room + 1) is None
    assert (pair.ledger.refs, pair.target.pool.num_free) == (refs, mapped)
    assert (pair.kv.host_bytes, pair.num_freed) == (0, 0)
    check(pair.target, pair.kv)
    slot.free()
    pair.attach_slot(list(pair.written)[:num_room])
    pair.bring_in()
    assert {block: read_block(pair.kv, block) for block in own} == own


def test_a_request_that_ends_before_they_came(pair: Pair) -> None:
    attached = pair.attach_slot([2, 3, 4, 5])
    pair.ledger.release(attached[:1])
    pair.kv.discard_dead()
    assert pair.num_freed == 0
    pair.ledger.release(attached[1:])
    pair.kv.discard_dead()
    assert pair.num_freed == 1
    assert pair.kv.is_whole
    assert pair.kv.index.extents(Place.UNMAPPED) == all_extents(pair.kv)
    assert pair.ledger.num_free == 0
    check(pair.target, pair.kv)


def test_a_request_that_ends_while_they_come(pair: Pair) -> None:
    attached = pair.attach_slot([2, 3, 4, 5])
    with pair.target.copies_held():
        pair.kv.begin_page_in([pair.kv.index.extents(Place.HOST)[0]], pair.target.ins)
        pair.ledger.release(attached)
        pair.kv.discard_dead()
        assert (pair.num_freed, pair.ledger.num_free) == (0, 0)  # they are being read
        check(pair.target, pair.kv)
    pair.target.finish(pair.kv)
    assert pair.num_freed == 1
    assert pair.kv.is_whole
    check(pair.target, pair.kv)


def test_what_is_called_back_comes_later(pair: Pair) -> None:
    blocks = [9, 8, 7, 6]
    attached = pair.attach_slot(blocks)
    with pair.target.copies_held():
        pair.kv.begin_page_in([pair.kv.index.extents(Place.HOST)[0]], pair.target.ins)
        open_later(pair.target.in_copy_stream)
        pair.kv.stop(Place.ARRIVING)
    assert pair.num_freed == len(pair.kv.index.extents(Place.DEVICE)[:1])
    pair.bring_in()
    assert pair.num_freed == 1
    assert [read_block(pair.kv, one) for one in attached] == [pair.written[b] for b in blocks]


def test_a_copy_that_fails_can_be_made_again(pair: Pair) -> None:
    blocks = [2, 3, 4]
    attached = pair.attach_slot(blocks)
    pair.target.in_copy_stream.error = OSError("the link is broken")
    with pytest.raises(OSError, match="the link is broken"):
        pair.target.page_in(pair.kv, pair.kv.index.extents(Place.HOST)[0])
    with contextlib.suppress(OSError):
        pair.kv.settle()
    assert (pair.num_freed, pair.kv.is_on_device(attached)) == (0, False)
    check(pair.target, pair.kv)
    pair.bring_in()
    assert [read_block(pair.kv, one) for one in attached] == [pair.written[b] for b in blocks]


def test_what_has_not_come_in_can_be_sent_on(pair: Pair) -> None:
    """From the first device's host memory to the second's, without its device."""
    blocks = [7, 2, 5]
    attached = pair.attach_slot(blocks)
    slot, transfer, told = export(pair.target, pair.kv, attached)
    pair.ledger.release(attached)
    pair.kv.discard_dead()
    transfer.wait()
    pair.kv.settle()
    assert (told, pair.num_freed, pair.kv.resident_bytes) == ([True], 1, 0)
    assert in_slot(slot) == row_by_row(pair.sender, pair.written, blocks)
    slot.free()
    check(pair.target, pair.kv)


def test_of_the_same_cache(rig: Rig) -> None:
    """Nothing in it is borrowed then."""
    kv, _, written = backed(rig, "unaligned")
    other, ledger = rig.kv(geometry_of("unaligned"))
    slot, transfer, _ = export(rig, kv, [4, 3])
    transfer.wait()
    kv.settle()
    attached = other.attach_slot(slot, 2)
    assert attached is not None
    assert (other.peer_host_bytes, other.host_bytes) == (0, rig.host.used_bytes)
    rig.page_in(other, other.index.extents(Place.HOST)[0])
    assert [read_block(other, block) for block in attached] == [written[4], written[3]]
    assert rig.host.used_bytes == 0
    ledger.release(attached)
    check(rig, kv, other)


def test_a_model_that_goes_lets_go_of_them(pair: Pair) -> None:
    pair.attach_slot([2, 3])
    pair.kv.close()
    assert pair.num_freed == 1
