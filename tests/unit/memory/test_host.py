"""The KV host cache, and what others find in its table."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from gpupoold.memory import libc
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import Device
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host import (
    KEY_BYTES,
    MAX_BLOCKS,
    OWNER_BYTES,
    CacheShape,
    HostSlot,
    KvHostCache,
    PrefixTable,
)
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.slabs import BlockPlace
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.rig import PAGE, read, until, write

SHAPE = CacheShape(budget_bytes=3 << 20, slab_bytes=4096, num_ranks=2)
OWNER = b"o" * OWNER_BYTES


def test_only_what_a_gpu_copies_from_has_its_pages_before_they_are_used() -> None:
    emulated = EmulatedDevice(PAGE, PAGE)
    header_bytes = os.sysconf("SC_PAGE_SIZE")  # of the table behind the slots
    with pinned_cache(emulated) as cache:
        assert os.fstat(cache.fd).st_blocks * 512 == header_bytes
    emulated.close()
    gpu = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=FakeCuda(PAGE))
    with pinned_cache(gpu) as cache:
        until(lambda: not gpu.unpinned().num_bytes)
        assert os.fstat(cache.fd).st_blocks * 512 == (1 << 20) + header_bytes
    gpu.close()


@contextmanager
def pinned_cache(device: Device) -> Iterator[KvHostCache]:
    cache = KvHostCache(1 << 20)
    cache.pin(device)
    yield cache
    cache.unpin(device)
    cache.close()


def test_a_cache_that_does_not_fit_is_refused_before_its_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=FakeCuda(PAGE))
    cache = KvHostCache(1 << 20)
    monkeypatch.setattr(libc, "available_bytes", lambda: 1 << 19)
    with pytest.raises(OSError, match="the KV host cache needs 1020 KiB, 512 KiB is available"):
        cache.pin(gpu)
    cache.close()
    gpu.close()


def test_the_parts_of_ranks_are_near_their_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(libc, "prefer_node", lambda at, size, node: asked.append((size, node)))
    HostBuffer.create("snapshot", 3 * PAGE, (1, 0)).close()
    assert asked == [(3 * PAGE, 1), (3 * PAGE, 0)]
    device = EmulatedDevice(PAGE, PAGE)
    device.rank_nodes, device.num_ranks = (0, 1), 2
    cache = KvHostCache(4 * PAGE, PAGE, num_ranks=2)
    cache.pin(device)
    assert asked[2:] == [(4 * PAGE, 0), (4 * PAGE, 1)]
    cache.unpin(device)
    cache.close()
    device.close()


def test_slots_within_the_budget() -> None:
    cache = KvHostCache(10 * PAGE + 5, slab_bytes=PAGE)
    assert (cache.budget_bytes, cache.used_bytes, cache.slabs.free_bytes) == (
        10 * PAGE,
        0,
        10 * PAGE,
    )
    assert cache.num_free_blocks(1000) == 40
    slot = allocate(cache, 1000, 6)
    assert [size for _, size in slot.pieces()] == [4000, 2000]
    assert (slot.num_bytes, cache.used_bytes) == (6000, 6000)
    assert (cache.slabs.reserved_bytes, cache.slabs.free_bytes) == (2 * PAGE, 8 * PAGE)
    assert cache.num_free_blocks(1000) == 34
    assert cache.allocate(1000, 35) is None
    assert cache.used_bytes == 6000
    cache.slabs.check_integrity()
    slot.free()
    assert (cache.used_bytes, cache.slabs.reserved_bytes) == (0, 0)
    with pytest.raises(ValueError, match="double free"):
        slot.free()
    cache.close()


def test_slots_of_all_shapes_have_their_own_bytes() -> None:
    cache = KvHostCache(32 * PAGE, slab_bytes=PAGE)
    slots = [allocate(cache, block_bytes, 3) for block_bytes in (500, 1500, 6000) for _ in range(4)]
    for slot in slots[::2]:
        slot.free()
    scattered = [allocate(cache, 500, 9), allocate(cache, 1500, 5)]
    assert [len(slot.pieces()) > 1 for slot in scattered] == [True, True]
    live = [*scattered, *slots[1::2]]
    for number, slot in enumerate(live):
        for address, size in slot.pieces():
            write(address, bytes([number + 1]) * size)
    for number, slot in enumerate(live):
        data = b"".join(read(address, size) for address, size in slot.pieces())
        assert data == bytes([number + 1]) * slot.num_bytes
        slot.free()
    assert cache.slabs.free_bytes == cache.budget_bytes
    cache.slabs.check_integrity()
    cache.close()


def test_the_whole_budget_is_mapped() -> None:
    cache = KvHostCache(1 << 20)
    blocks = cache.num_free_blocks(1 << 10)
    assert blocks == 1 << 10
    slot = allocate(cache, 1 << 10, blocks)
    assert cache.slabs.free_bytes == 0
    for address, size in slot.pieces():
        write(address, b"x" * size)
    cache.close()


def test_a_budget_of_nothing() -> None:
    cache = KvHostCache(0)
    assert (cache.budget_bytes, cache.slabs.free_bytes, cache.num_free_blocks(1)) == (0, 0, 0)
    slot = allocate(cache, 1000, 0)
    assert slot.pieces() == []
    slot.free()
    assert cache.allocate(1, 1) is None
    device = EmulatedDevice(PAGE, PAGE)
    cache.pin(device)
    cache.unpin(device)
    cache.close()
    device.close()


def test_a_slab_size_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="slabs of 0 bytes"):
        KvHostCache(PAGE, slab_bytes=0)


def allocate(cache: KvHostCache, block_bytes: int, num_blocks: int) -> HostSlot:
    slot = cache.allocate(block_bytes, num_blocks)
    assert slot is not None
    return slot


def test_extents_lie_in_a_slot_one_behind_the_other() -> None:
    cache = KvHostCache(8 * PAGE, slab_bytes=PAGE)
    filler = cache.allocate(PAGE // 4, 6)
    between = cache.allocate(PAGE, 1)
    slot = cache.allocate(PAGE // 4, 4)  # the rest of one slab and the start of another
    assert filler is not None
    assert between is not None
    assert slot is not None
    extents = [(1000, 100), (5000, 700), (9000, PAGE - 800)]
    laid = list(slot.beside(extents))
    assert [n for _, _, n in laid] == [100, 700, PAGE // 2 - 800, PAGE // 2]
    assert [a for a, _, _ in laid] == [1000, 5000, 9000, 9000 + PAGE // 2 - 800]
    in_slot = [(h, n) for _, h, n in laid]
    (first, length), (second, rest) = slot.pieces()
    assert (length, rest) == (PAGE // 2, PAGE // 2)
    assert in_slot == [
        (first, 100),
        (first + 100, 700),
        (first + 800, PAGE // 2 - 800),
        (second, PAGE // 2),
    ]
    filler.free()
    between.free()
    slot.free()
    cache.close()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("table")
    os.ftruncate(fd, SHAPE.file_bytes)
    PrefixTable(fd, SHAPE, is_new=True).close()
    yield fd
    os.close(fd)


def keys(*numbers: int) -> list[bytes]:
    return [b"%036d" % number for number in numbers]


def places(*numbers: int) -> list[BlockPlace]:
    return [BlockPlace(number, number + 1) for number in numbers]


def writer(fd: int) -> PrefixTable:
    table = PrefixTable(fd, SHAPE)
    table.open_for_writing()
    return table


def add(table: PrefixTable, *numbers: int, arrives: bool = True) -> int:
    number = table.add(OWNER, 512, keys(*numbers), places(*numbers))
    assert number is not None
    if arrives:
        table.note_arrival(number)
    return number


def test_a_reader_finds_what_has_arrived(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    number = add(table, 1, 2, 3, arrives=False)
    assert reader.read(number) is None
    table.note_arrival(number)
    record = reader.read(number)
    assert record is not None
    assert record.owner == OWNER
    assert record.block_bytes == 512
    assert record.keys == tuple(keys(1, 2, 3))
    assert record.places == tuple(places(1, 2, 3))
    assert reader.is_current(number, record.version)


def test_a_removed_record_is_not_current_even_if_another_takes_its_number(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    number = add(table, 1)
    record = reader.read(number)
    assert record is not None
    table.remove(number)
    assert not reader.is_current(number, record.version)
    assert reader.read(number) is None
    assert add(table, 1) == number
    assert not reader.is_current(number, record.version)


def test_a_reader_follows_the_additions(fd: int) -> None:
    table, reader = writer(fd), PrefixTable(fd, SHAPE)
    first = add(table, 1)
    assert reader.added_since(0) == ([first], 1)
    assert reader.added_since(1) == ([], 1)
    for _ in range(9000):  # more than the ring has places
        table.remove(add(table, 2))
    second = add(table, 2)
    found, total = reader.added_since(1)
    assert set(found) == {first, second}
    assert total == 9002
    assert reader.added_since(total - 1)[0] == [second]


def test_the_next_writer_goes_on(fd: int) -> None:
    table = writer(fd)
    old, used, unfinished = add(table, 1), add(table, 2), add(table, 3, arrives=False)
    newer = add(table, *range(10, 10 + MAX_BLOCKS))
    table.note_use(used)
    table.close()
    reader = PrefixTable(fd, SHAPE)
    versions = {one: record.version for one in (old, used) if (record := reader.read(one))}
    table = PrefixTable(fd, SHAPE)
    records = table.open_for_writing()
    assert [record.number for record in records] == [old, newer, used]
    assert table.numbers == {old, used, newer}
    again = add(table, 4)
    assert again == unfinished
    record = reader.read(again)
    assert record is not None
    assert record.version > max(versions.values())
    assert all(reader.is_current(one, version) for one, version in versions.items())


def test_a_full_table_takes_no_more(fd: int) -> None:
    table = writer(fd)
    numbers = {add(table, one) for one in range(SHAPE.num_records)}
    assert len(numbers) == SHAPE.num_records
    assert table.add(OWNER, 512, keys(0), places(0)) is None
    table.remove(numbers.pop())
    assert table.add(OWNER, 512, keys(0), places(0)) is not None


@pytest.mark.parametrize(
    "shape",
    [
        CacheShape(2 << 20, 4096, 3),  # the table is at the same place
        CacheShape(6 << 20, 4096, 1),
    ],
)
def test_a_table_of_another_cache_is_refused(fd: int, shape: CacheShape) -> None:
    writer(fd).close()
    os.ftruncate(fd, shape.file_bytes)
    with pytest.raises(ValueError, match="other sizes"):
        PrefixTable(fd, shape)


def test_a_file_of_another_size_is_refused(fd: int) -> None:
    os.ftruncate(fd, SHAPE.file_bytes + 4096)
    with pytest.raises(ValueError, match="has not the"):
        PrefixTable(fd, SHAPE)


def test_a_table_of_other_slabs_is_refused(fd: int) -> None:
    with pytest.raises(ValueError, match="other sizes"):
        PrefixTable(fd, CacheShape(3 << 20, 8192, 2))


def test_numbers_beyond_the_table_are_no_records(fd: int) -> None:
    assert PrefixTable(fd, SHAPE).read(SHAPE.num_records) is None


def test_sizes_are_those_of_vllms_keys() -> None:
    from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id

    assert len(make_block_hash_with_group_id(b"h" * 32, 1)) == KEY_BYTES  # type: ignore[arg-type]
