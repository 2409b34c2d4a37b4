"""Host buffers and the KV host cache."""

from __future__ import annotations

import os

import pytest

from gpupoold.memory.contracts import OutOfPages
from gpupoold.memory.host import HostBuffer, KvHostCache
from tests.unit.memory.rig import PAGE, read, write


def test_a_buffer_is_zeroed_and_shared_by_its_descriptor() -> None:
    buffer = HostBuffer.create("image", 3 * PAGE)
    assert read(buffer.address, 3 * PAGE) == bytes(3 * PAGE)
    write(buffer.address, b"abc")
    other = HostBuffer(os.dup(buffer.fd), 3 * PAGE)
    buffer.close()
    assert read(other.address, 3) == b"abc"
    other.close()


def test_closing_twice_harms_nobody() -> None:
    buffer = HostBuffer.create("image", PAGE)
    buffer.close()
    later = HostBuffer.create("later", PAGE)  # likely the same descriptor and address
    buffer.close()
    write(later.address, b"still there")
    os.fstat(later.fd)
    later.close()


def test_a_buffer_that_cannot_be_mapped_closes_its_descriptor() -> None:
    fd = os.memfd_create("empty")
    with pytest.raises(OSError, match="mmap of 0 bytes"):
        HostBuffer(fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_slots_within_the_budget() -> None:
    cache = KvHostCache(10 * PAGE + 5, PAGE)
    assert (cache.used_bytes, cache.free_bytes) == (0, 10 * PAGE)
    slot = cache.allocate(PAGE + 1)
    assert sum(size for _, size in slot.pieces()) == 2 * PAGE
    assert (cache.used_bytes, cache.free_bytes) == (2 * PAGE, 8 * PAGE)
    with pytest.raises(OutOfPages):
        cache.allocate(8 * PAGE + 1)
    cache.check_integrity()
    slot.free()
    assert cache.used_bytes == 0
    cache.close()


def test_slots_do_not_overlap() -> None:
    cache = KvHostCache(12 * PAGE, PAGE)
    slots = [cache.allocate(2 * PAGE) for _ in range(6)]
    for slot in slots[::2]:
        slot.free()
    scattered = cache.allocate(5 * PAGE)
    live = [scattered, *slots[1::2]]
    for number, slot in enumerate(live):
        for address, size in slot.pieces():
            write(address, bytes([number + 1]) * size)
    for number, slot in enumerate(live):
        data = b"".join(read(address, size) for address, size in slot.pieces())
        assert data == bytes([number + 1]) * len(data)
        slot.free()
    cache.check_integrity()
    cache.close()


def test_an_empty_slot_needs_no_room() -> None:
    cache = KvHostCache(0, PAGE)
    slot = cache.allocate(0)
    assert slot.pieces() == []
    slot.free()
    with pytest.raises(OutOfPages):
        cache.allocate(1)
    cache.close()
