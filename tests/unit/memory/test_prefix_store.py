"""Copies of KV blocks of ended requests in a KV host cache."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator

import pytest

from gpupoold.memory.host import KvHostCache
from gpupoold.memory.kv_extents import KvRow
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks

# Two layers: a block has 1 KiB and 3 KiB.
ROWS = (KvRow(0, 1024, 1024), KvRow(1 << 20, 3072, 3072))
BLOCK_BYTES = 4096
HOST_BYTES = 64 * BLOCK_BYTES


@pytest.fixture
def host() -> Iterator[KvHostCache]:
    host = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES)
    yield host
    host.slabs.check_integrity()
    host.close()


def keys(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def save(store: PrefixStore, owner: str, *numbers: int) -> list[int]:
    """Save blocks; the indices of those that had no copy yet."""
    room = store.begin(owner, keys(*numbers), ROWS)
    if room is None:
        return []
    indices, copies = room
    copies.note_arrival(has_arrived=True)
    copies.free()
    store.check_integrity()
    return indices


def write(copies: StoredBlocks, num_blocks: int, seed: int) -> bytes:
    """Fill copies with bytes, row after row."""
    content = random.Random(seed).randbytes(num_blocks * BLOCK_BYTES)
    extents = ((0, row.num_bytes) for row in ROWS for _ in range(num_blocks))
    at = 0
    for _, address, num_bytes in copies.beside(extents):
        ctypes.memmove(address, content[at : at + num_bytes], num_bytes)
        at += num_bytes
    assert at == len(content)
    return content


def read(copies: StoredBlocks, num_blocks: int) -> bytes:
    extents = ((0, row.num_bytes) for row in ROWS for _ in range(num_blocks))
    return b"".join(ctypes.string_at(address, n) for _, address, n in copies.beside(extents))


def test_the_bytes_of_each_block_come_back(host: KvHostCache) -> None:
    store = PrefixStore(host)
    room = store.begin("a", keys(*range(20)), ROWS)
    assert room is not None
    indices, copies = room
    assert indices == list(range(20))
    assert copies.num_bytes == 20 * BLOCK_BYTES
    content = write(copies, 20, seed=1)
    copies.note_arrival(has_arrived=True)
    copies.free()
    chosen = [3, 17, 4]
    taken = store.take("a", keys(*chosen), ROWS)
    small = 20 * ROWS[0].num_bytes
    expected = b"".join(content[n * 1024 : (n + 1) * 1024] for n in chosen)
    expected += b"".join(content[small + n * 3072 : small + (n + 1) * 3072] for n in chosen)
    assert read(taken, 3) == expected
    taken.free()


def test_only_blocks_without_a_copy_are_copied(host: KvHostCache) -> None:
    store = PrefixStore(host)
    assert save(store, "a", 1, 2, 3) == [0, 1, 2]
    assert save(store, "a", 1, 2, 3, 4, 5) == [3, 4]
    assert save(store, "a", 1, 2) == []
    assert save(store, "b", 1) == [0], "another engine has other keys"


def test_a_block_exists_once_its_bytes_have_arrived(host: KvHostCache) -> None:
    store = PrefixStore(host)
    room = store.begin("a", keys(1), ROWS)
    assert room is not None
    assert not store.has("a", b"1")
    room[1].note_arrival(has_arrived=True)
    assert store.has("a", b"1")
    assert not store.has("b", b"1")
    room[1].free()


def test_a_failed_copy_is_forgotten(host: KvHostCache) -> None:
    store = PrefixStore(host)
    room = store.begin("a", keys(1), ROWS)
    assert room is not None
    room[1].note_arrival(has_arrived=False)
    room[1].free()
    assert not store.has("a", b"1")
    assert store.used_bytes == host.used_bytes == 0
    assert save(store, "a", 1) == [0]


def test_the_end_of_the_oldest_conversation_goes_first(host: KvHostCache) -> None:
    store = PrefixStore(host, 32 * BLOCK_BYTES)
    old, new = list(range(16)), list(range(100, 116))
    save(store, "a", *old)
    save(store, "a", *new)
    save(store, "a", *range(200, 208))
    assert [store.has("a", key) for key in keys(*old)] == [True] * 8 + [False] * 8
    assert all(store.has("a", key) for key in keys(*new))
    store.take("a", keys(*old[:8]), ROWS).free()  # used now
    save(store, "a", *range(300, 308))
    assert all(store.has("a", key) for key in keys(*old[:8]))
    assert not store.has("a", b"115")


def test_live_kv_takes_the_memory_of_copies(host: KvHostCache) -> None:
    store = PrefixStore(host)
    save(store, "a", *range(64))
    assert host.num_free_blocks(BLOCK_BYTES) == 64
    slot = host.allocate(BLOCK_BYTES, 60)
    assert slot is not None
    store.check_integrity()
    assert host.used_bytes - host.prefix_bytes == 60 * BLOCK_BYTES
    slot.free()


def test_live_kv_of_another_shape_takes_the_memory_of_copies(host: KvHostCache) -> None:
    store = PrefixStore(host)
    save(store, "a", *range(64))
    assert host.make_room(3 * BLOCK_BYTES, 10) >= 10
    slot = host.allocate(3 * BLOCK_BYTES, 10)
    assert slot is not None
    slot.free()


def test_blocks_in_use_stay(host: KvHostCache) -> None:
    store = PrefixStore(host)
    save(store, "a", *range(64))
    taken = store.take("a", keys(0, 1), ROWS)
    assert host.make_room(BLOCK_BYTES, 64) == 56
    assert store.has("a", b"0")
    assert not store.evict_oldest()
    taken.free()
    assert store.evict_oldest()
    assert store.used_bytes == 0


def test_blocks_without_room_are_left_out(host: KvHostCache) -> None:
    store = PrefixStore(host, 16 * BLOCK_BYTES)
    assert save(store, "a", *range(40)) == list(range(16))
    slot = host.allocate(BLOCK_BYTES, 64)
    assert slot is not None
    assert save(store, "a", 1000) == []
    slot.free()


def test_an_engine_takes_its_copies_along(host: KvHostCache) -> None:
    store = PrefixStore(host)
    save(store, "a", *range(10))
    save(store, "b", *range(10))
    store.forget("a")
    store.check_integrity()
    assert store.used_bytes == 10 * BLOCK_BYTES
    assert not store.has("a", b"1")
    assert store.has("b", b"1")
    store.forget("unknown")


def lasting(name: str) -> str:
    return name.encode().hex().ljust(64, "0")


def long_keys(*numbers: int) -> list[bytes]:
    return [b"%036d" % number for number in numbers]


def fill(store: PrefixStore, owner: str, *numbers: int, arrives: bool = True) -> bytes:
    """Save blocks in a store that lasts; return their bytes."""
    room = store.begin(owner, long_keys(*numbers), ROWS)
    assert room is not None
    indices, copies = room
    assert len(indices) == len(numbers)
    content = write(copies, len(numbers), seed=numbers[0])
    if arrives:
        copies.note_arrival(has_arrived=True)
        copies.free()
    store.check_integrity()
    return content


def next_process(host: KvHostCache, budget_bytes: int | None = None) -> PrefixStore:
    """The store of a process that takes the memory of ``host`` over, whose process has died."""
    fd = os.dup(host.fd)
    successor = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES, former_fd=fd)
    assert successor.fd == fd
    store = PrefixStore(successor, budget_bytes)
    store.check_integrity()
    successor.slabs.check_integrity()
    return store


def content_of(store: PrefixStore, owner: str, *numbers: int) -> bytes:
    taken = store.take(owner, long_keys(*numbers), ROWS)
    content = read(taken, len(numbers))
    taken.free()
    return content


def test_the_next_process_has_the_copies(host: KvHostCache) -> None:
    store = PrefixStore(host)
    kept, other = lasting("a"), lasting("b")
    content = fill(store, kept, *range(20))
    more = fill(store, other, 3, 4)
    fill(store, kept, 30, arrives=False)  # a copy under way ends with its process
    save(store, "engine 1", 1, 2)  # the KV of an engine ends with the engine
    successor = next_process(host)
    assert successor.used_bytes == 22 * BLOCK_BYTES
    assert content_of(successor, kept, *range(20)) == content
    assert content_of(successor, other, 3, 4) == more
    assert not successor.has(kept, long_keys(30)[0])
    assert not any(successor.has("engine 1", key) for key in keys(1, 2))
    # What it stores goes elsewhere.
    new = fill(successor, kept, 40, 41)
    assert content_of(successor, kept, *range(20)) == content
    assert content_of(successor, kept, 40, 41) == new


def test_evicted_copies_do_not_come_back(host: KvHostCache) -> None:
    store = PrefixStore(host)
    kept = lasting("a")
    fill(store, kept, *range(8))
    fill(store, kept, *range(8, 12))
    assert store.evict_oldest()
    successor = next_process(host)
    assert not any(successor.has(kept, key) for key in long_keys(*range(8)))
    assert all(successor.has(kept, key) for key in long_keys(*range(8, 12)))


def test_the_order_of_eviction_lasts_and_a_smaller_budget_holds(host: KvHostCache) -> None:
    store = PrefixStore(host)
    kept = lasting("a")
    for first in (0, 8, 16):
        fill(store, kept, *range(first, first + 8))
    store.take(kept, long_keys(*range(8)), ROWS).free()  # used after the others
    successor = next_process(host, budget_bytes=16 * BLOCK_BYTES)
    assert successor.used_bytes == 16 * BLOCK_BYTES
    assert not successor.has(kept, long_keys(8)[0])
    assert successor.evict_oldest()
    assert not successor.has(kept, long_keys(16)[0])
    assert successor.has(kept, long_keys(0)[0])


def test_a_cache_of_other_sizes_begins_empty(host: KvHostCache) -> None:
    fill(PrefixStore(host), lasting("a"), 1)
    successor = KvHostCache(2 * HOST_BYTES, 4 * BLOCK_BYTES, former_fd=os.dup(host.fd))
    assert PrefixStore(successor).used_bytes == 0
    successor.close()


def test_a_damaged_table_gives_no_wrong_bytes(host: KvHostCache) -> None:
    """Two records of one place, as no writer leaves behind."""
    store, owner = PrefixStore(host), lasting("a")
    fill(store, owner, 1, 2)
    assert host.table is not None
    [record] = [host.table.read(number) for number in host.table.numbers]
    assert record is not None
    twice = host.table.add(record.owner, record.block_bytes, long_keys(5, 6), record.places)
    assert twice is not None
    host.table.note_arrival(twice)
    successor = next_process(host)
    assert successor.used_bytes == 2 * BLOCK_BYTES
    host.table.remove(twice)


def test_forgotten_copies_are_freed_after_their_use(host: KvHostCache) -> None:
    store, owner = PrefixStore(host), lasting("a")
    fill(store, owner, *range(10))
    fill(store, lasting("b"), 1)
    taken = store.take(owner, long_keys(0), ROWS)
    store.forget(owner[:32])
    store.check_integrity()
    assert not any(store.has(owner, key) for key in long_keys(*range(10)))
    assert store.used_bytes == (8 + 1) * BLOCK_BYTES
    assert fill(store, owner, *range(4))  # as if it had never been there
    taken.free()
    store.check_integrity()
    assert store.used_bytes == (4 + 1) * BLOCK_BYTES
    assert content_of(next_process(host), owner, *range(4))
