"""A leader's device and a follower's, both emulated: each order reaches both."""

from __future__ import annotations

import ctypes
import os
import random
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import pytest

from gpupoold.errors import Failed
from gpupoold.memory import libc
from gpupoold.memory.device import AddressRange, Copy, Direction, Unpinned
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.group.device import FollowerMemory, GroupDevice
from gpupoold.memory.group.link import Link, OrderBook, OrderCount, RankLost, run_files, run_orders
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.libc import create_memfd
from gpupoold.memory.pages import PagePool, PageRun

NUM_PAGES = 16
PAGE_BYTES = 64 << 10


class Pair:
    """A group of two ranks in one process, with a region of the same size on each rank."""

    def __init__(self) -> None:
        self.leader, self.follower = (
            EmulatedDevice(NUM_PAGES * PAGE_BYTES, PAGE_BYTES) for _ in range(2)
        )
        (ours, theirs), (files, their_files) = Link.pair(), Link.pair()
        self.done = OrderCount()
        self.memory = FollowerMemory(self.follower, 1, self.done)
        self.orders = OrderBook([ours])
        self.unpinned = memoryview(bytearray(16)).cast("Q")
        self.device = GroupDevice(
            self.leader, self.orders, [files], NUM_PAGES, (0, 1), self.unpinned
        )
        self._links = (ours, files)
        self._threads = [
            threading.Thread(target=_until_closed, args=(run, link, self))
            for run, link in ((run_orders, theirs), (run_files, their_files))
        ]
        for thread in self._threads:
            thread.start()
        self.pool = PagePool(NUM_PAGES)

    def range(self, num_pages: int) -> tuple[AddressRange, int]:
        """A region of an address range on both ranks, and the follower's address."""
        mine = AddressRange(self.device, self.pool, num_pages)
        address = self.follower.reserve(num_pages)
        number = self.device.regions.new_number()
        release = lambda: self.follower.release(address, num_pages)  # noqa: E731
        self.memory.regions.add(number, address, release)
        self.device.regions.add(number, mine.address, num_pages * PAGE_BYTES)
        return mine, address

    def close(self) -> None:
        for link in self._links:
            link.close()
        for thread in self._threads:
            thread.join()


def _until_closed(run: object, link: Link, pair: Pair) -> None:
    with suppress(RankLost):
        run(link, [pair.memory, pair.memory.regions], pair.done)  # type: ignore[operator]
    link.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def content(address: int, num_bytes: int = PAGE_BYTES) -> bytes:
    buffer = bytearray(num_bytes)
    view = (ctypes.c_char * num_bytes).from_buffer(buffer)
    libc.memcpy(ctypes.addressof(view), address, num_bytes)
    return bytes(buffer)


def host(pair: Pair, num_pages: int) -> tuple[int, int]:
    """Shared host memory with a part for each rank, filled differently; the leader's and the
    follower's address."""
    num_bytes = num_pages * PAGE_BYTES
    fd = create_memfd("parts", 2 * num_bytes)
    for rank in range(2):
        os.pwrite(fd, bytes([65 + rank]) * num_bytes, rank * num_bytes)
    address = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, libc.MAP_SHARED, fd, 0)
    pair.device.share_host(address, num_bytes, fd)
    theirs = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, libc.MAP_SHARED, fd, num_bytes)
    os.close(fd)
    return address, theirs


def test_each_rank_is_filled_from_its_part_of_the_host_memory(pair: Pair) -> None:
    mine, theirs = pair.range(4)
    source, _ = host(pair, 4)
    mine.retain(range(1, 3), source + PAGE_BYTES)
    pair.device.wait_for_ranks()
    assert content(mine.address + PAGE_BYTES) == b"A" * PAGE_BYTES
    assert content(theirs + 2 * PAGE_BYTES) == b"B" * PAGE_BYTES
    mine.drop(range(1, 3))
    mine.close()
    pair.device.wait_for_ranks()


def test_new_pages_have_zeros_on_all_ranks(pair: Pair) -> None:
    mine, theirs = pair.range(2)
    source, _ = host(pair, 2)
    mine.retain(range(2), source)
    mine.drop(range(2))
    mine.retain(range(1))
    pair.device.wait_for_ranks()
    assert not any(content(theirs))
    mine.close()


def test_a_copy_stream_follows_the_orders_before_its_fence(pair: Pair) -> None:
    mine, _theirs = pair.range(4)
    target, their_target = host(pair, 4)
    out = pair.device.open_copy_stream(Direction.OUT)
    mine.retain(range(4))
    for turn in range(20):
        pair.device.zero(mine.address, 4 * PAGE_BYTES)
        pair.device.copy_in(mine.address, target, PAGE_BYTES)
        after = out.fence()
        copies = [Copy(target + PAGE_BYTES, mine.address, PAGE_BYTES)]
        out.wait(out.begin(copies, after))
        assert content(target + PAGE_BYTES) == content(target)
        assert content(their_target + PAGE_BYTES) == content(their_target)
        libc.memset(target, turn, PAGE_BYTES)
        libc.memset(their_target, 100 + turn, PAGE_BYTES)
    out.close()
    mine.close()


def test_random_mappings_agree(pair: Pair) -> None:
    """What is mapped where is the same on both ranks after any sequence of calls."""
    rng = random.Random(1)
    ranges = [pair.range(8) for _ in range(3)]
    source, _ = host(pair, 8)
    held: set[tuple[int, int]] = set()
    for _ in range(200):
        index, page = rng.randrange(3), rng.randrange(8)
        mine = ranges[index][0]
        if (index, page) in held:
            mine.drop(range(page, page + 1))
            held.remove((index, page))
        elif pair.pool.num_free:
            mine.retain(range(page, page + 1), source + page * PAGE_BYTES)
            held.add((index, page))
    pair.device.wait_for_ranks()
    for index, page in held:
        mine, theirs = ranges[index]
        assert content(mine.address + page * PAGE_BYTES) == b"A" * PAGE_BYTES
        assert content(theirs + page * PAGE_BYTES) == b"B" * PAGE_BYTES
    for mine, _ in ranges:
        mine.close()


def test_a_mapping_that_fails_here_is_undone_there(pair: Pair) -> None:
    mine, theirs = pair.range(4)
    failing = pair.leader.map

    def fail(address: int, runs: list[PageRun]) -> None:
        raise MemoryError

    pair.leader.map = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        mine.retain(range(2), is_filled=False)
    pair.leader.map = failing  # type: ignore[method-assign]
    mine.retain(range(2))
    pair.device.wait_for_ranks()
    assert not any(content(theirs))
    mine.close()


def test_slots_of_the_host_cache_are_each_ranks_own(pair: Pair) -> None:
    cache = KvHostCache(8 * PAGE_BYTES, PAGE_BYTES, num_ranks=2)
    cache.pin(pair.device)
    mine, theirs = pair.range(1)
    mine.retain(range(1))
    slot = cache.allocate(PAGE_BYTES, 1)
    assert slot is not None
    [(address, num_bytes)] = slot.pieces()
    pair.device.wait_for_ranks()
    libc.memset(mine.address, 1, PAGE_BYTES)
    libc.memset(theirs, 2, PAGE_BYTES)
    pair.device.copy_out(address, mine.address, num_bytes)
    pair.device.zero(mine.address, PAGE_BYTES)
    pair.device.copy_in(mine.address, address, num_bytes)
    pair.device.wait_for_ranks()
    assert content(mine.address) == b"\1" * PAGE_BYTES
    assert content(theirs) == b"\2" * PAGE_BYTES
    slot.free()
    cache.unpin(pair.device)
    cache.close()
    mine.close()


def test_bytes_that_a_follower_has_not_pinned_count(pair: Pair) -> None:
    assert pair.device.unpinned() == Unpinned(0)
    pair.unpinned[1] = 10
    assert pair.device.unpinned() == Unpinned(5)


def test_an_error_of_a_follower_reaches_the_caller(pair: Pair) -> None:
    fd = create_memfd("short", PAGE_BYTES)
    with pytest.raises(Failed):
        pair.device.share_host(0, -1, fd)
    os.close(fd)


def test_a_fence_that_is_too_old_is_refused_before_any_rank_copies(pair: Pair) -> None:
    with closing(pair.device.open_copy_stream(Direction.IN)) as stream:
        first = stream.fence()
        stream.wait(stream.begin([], first))
        for _ in range(4096):
            latest = stream.fence()
        text = f"fence {first}, which is not among the latest 4096"
        with pytest.raises(Failed, match=text):
            stream.begin([], first)
        stream.wait(stream.begin([], latest))


def test_a_batch_arrives_during_an_order_sent_after_its_fence(pair: Pair) -> None:
    """Weights arrive beside a step that waits for them."""
    mine, theirs = pair.range(2)
    source, _ = host(pair, 2)
    mine.retain(range(2))
    stream = pair.device.open_copy_stream(Direction.IN)
    fence = stream.fence()
    may_end = threading.Event()

    def wait() -> None:
        may_end.wait(60)

    number = pair.device.regions.new_number()
    pair.memory.regions.add(number, 0, wait)
    pair.orders.send("close_region", number)
    stream.wait(stream.begin([Copy(mine.address, source, PAGE_BYTES)], fence))
    assert content(theirs) == b"B" * PAGE_BYTES
    may_end.set()
    pair.device.wait_for_ranks()
    stream.close()
    mine.drop(range(2))
    mine.close()
