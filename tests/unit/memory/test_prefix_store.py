"""Copies of KV blocks of ended requests in a KV host cache."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest

from gpupoold.memory.geometry import KvRow
from gpupoold.memory.host import KvHostCache
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks

# Two layers: a block has 1 KiB and 3 KiB.
ROWS = (KvRow(0, 1024, 1024), KvRow(1 << 20, 3072, 3072))
BLOCK_BYTES = 4096
HOST_BYTES = 64 * BLOCK_BYTES


@pytest.fixture
def host() -> Iterator[KvHostCache]:
    host = KvHostCache(HOST_BYTES, 4 * BLOCK_BYTES)
    yield host
    host.check_integrity()
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
