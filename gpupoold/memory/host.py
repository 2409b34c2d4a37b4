"""The KV host cache, which processes share, and the table of its prefixes."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from blake3 import blake3

from gpupoold.memory import libc
from gpupoold.memory.device import Device
from gpupoold.memory.slabs import Allocation, BlockPlace, SlabAllocator, slab_bytes_for

_BLOCK_BYTES = 512  # of st_blocks

# Consecutive blocks of a request in one record, which are evicted together.
MAX_BLOCKS = 8
# A name of KV that several engines and processes may share, the owner of blocks, has two digests of
# so many hexadecimal digits: of the model's name and of all else that decides on the KV. So the
# names of one model begin alike, and nobody has to remember the engines that the model has had.
NUM_DIGITS = OWNER_BYTES = 32
KEY_BYTES = 36  # vLLM's SHA-256 of a block, with the number of the KV cache group

_MAGIC = int.from_bytes(b"gpkvidx1", "little")
_HEADER_BYTES = 4096
# Magic number, budget, bytes of a base slab, ranks, number of records.
_HEADER = struct.Struct("<QQQQQ")
_NUM_ADDED_AT = 512  # number of records added so far
_LATEST_AT = _HEADER_BYTES  # numbers of the records added last, a ring
_NUM_LATEST = 8192
_NUMBER = struct.Struct("<I")
_WORD = struct.Struct("<Q")
# Version, whether the bytes have arrived, last use, owner, bytes of a block, number of blocks;
# then the keys, and the place of each block.
_RECORD = struct.Struct(f"<QQQ{OWNER_BYTES}sQQ" + f"{KEY_BYTES}s" * MAX_BLOCKS + "II" * MAX_BLOCKS)
_RECORDS_AT = _LATEST_AT + _NUM_LATEST * _NUMBER.size
_ARRIVED, _LAST_USE = 8, 16  # offsets in a record
_VERSIONS = struct.Struct(f"<Q{_RECORD.size - 8}x")
_MIN_RECORDS, _MAX_RECORDS = 256, 1 << 16
_LEAST_RECORD_BYTES = 64 << 10  # of KV per record, on average


class Slot(Protocol):
    """Host memory with the KV of some blocks of one model, row by row."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks."""

    def beside(self, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        """Yield the extents with this slot's memory, as :func:`lay` does."""

    def free(self) -> None:
        """Free the slot."""


def lay(
    extents: Iterable[tuple[int, int]], pieces: Sequence[tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Distribute ``(address, num_bytes)`` extents over pieces of host memory in order.

    Yields ``(address, host_address, num_bytes)``, cut at the ends of pieces.
    """
    rest = iter(pieces)
    host_address, room = next(rest, (0, 0))
    for address, num_bytes in extents:
        while num_bytes:
            if not room:
                host_address, room = next(rest)
            length = min(num_bytes, room)
            yield address, host_address, length
            address, num_bytes = address + length, num_bytes - length
            host_address, room = host_address + length, room - length


class Evictable(Protocol):
    """Slots of a cache that may be freed for other slots, see :mod:`prefix_store`."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all these slots."""

    @property
    def evictable_bytes(self) -> int:
        """Bytes of the slots that may be freed now."""

    def evict_oldest(self) -> bool:
        """Free a slot; return False if none may be freed."""

    def check_integrity(self) -> None:
        """Raise AssertionError when the bookkeeping is inconsistent."""


class KvHostCache:
    """Host slots for the KV of paused requests, within a byte budget; for one thread.

    ``prefixes``, if set, keeps KV of ended requests here, which is evicted for other slots.

    Models with blocks of different sizes share the memory by slabs (:mod:`gpupoold.memory.slabs`).
    The kernel allocates the buffer's memory only when slots are first used or pinned.

    ``table`` has the places of these prefixes, behind the bytes of all ranks in the memfd; None in
    a cache without memory.
    """

    def __init__(
        self,
        budget_bytes: int,
        slab_bytes: int | None = None,
        *,
        num_ranks: int = 1,
        former_fd: int | None = None,
    ) -> None:
        """Reserve addresses for ``budget_bytes``, 0 or more, in base slabs of ``slab_bytes``.

        The memfd has a part of this size for each of ``num_ranks``; the first is this cache's.
        ``former_fd``, owned by this object, is the memfd of a cache of an ended process; its
        prefixes are kept if the cache had the same sizes.

        Raises:
            ValueError: the budget is negative or the slabs have no bytes.
            OSError: the process has too few addresses.
        """
        if slab_bytes is None:
            slab_bytes = slab_bytes_for(budget_bytes)
        self.slabs = SlabAllocator(budget_bytes, slab_bytes)
        self.prefixes: Evictable | None = None
        self.shape = shape = CacheShape(self.budget_bytes, slab_bytes, num_ranks)
        self.table: PrefixTable | None = None
        self.fd = _fd_of_shape(former_fd, shape)
        """The memfd, for other processes to map."""
        try:
            if self.budget_bytes:
                is_new = self.fd != former_fd
                self.table = PrefixTable(self.fd, shape, is_new=is_new)
            shared = libc.MAP_SHARED | libc.MAP_NORESERVE
            self.address = (
                libc.mmap(None, self.budget_bytes, libc.PROT_READ_WRITE, shared, self.fd, 0)
                if self.budget_bytes
                else 0
            )
        except OSError:
            os.close(self.fd)
            raise

    def claim(self, record: Record) -> HostSlot | None:
        """Return the slot of a record of ``table``; None if its memory is in use."""
        blocks = self.slabs.claim(record.block_bytes, record.places)
        return None if blocks is None else HostSlot(self, blocks)

    def pin(self, device: Device) -> None:
        """Pin the whole buffer for copies of ``device`` in idle moments.

        Raises OSError: the machine has too little free memory for the whole buffer.
        """
        if not self.budget_bytes:
            return
        if not device.is_host_addressable:
            missing_bytes = self.shape.data_bytes - os.fstat(self.fd).st_blocks * _BLOCK_BYTES
            libc.check_available("the KV host cache", missing_bytes)
        libc.prefer_nodes(self.fd, self.shape.data_bytes, device.rank_nodes)
        device.pin_later(self.address, self.budget_bytes)
        device.share_host(self.address, self.budget_bytes, self.fd)

    def unpin(self, device: Device) -> None:
        if self.budget_bytes:
            device.unpin(self.address, self.budget_bytes)

    @property
    def budget_bytes(self) -> int:
        """The budget in whole base slabs."""
        return self.slabs.num_bytes

    @property
    def used_bytes(self) -> int:
        return self.slabs.used_bytes

    @property
    def prefix_bytes(self) -> int:
        """The part of ``used_bytes`` with KV of ended requests."""
        return 0 if self.prefixes is None else self.prefixes.used_bytes

    def num_free_blocks(self, block_bytes: int) -> int:
        """Return an estimate of the number of blocks of ``block_bytes`` for one new slot.

        Too high if evictions of prefixes with blocks of other sizes free no whole slabs.
        """
        free, prefixes = self.slabs.num_free_blocks(block_bytes), self.prefixes
        return free + (0 if prefixes is None else prefixes.evictable_bytes // block_bytes)

    def make_room(self, block_bytes: int, num_blocks: int) -> int:
        """Evict prefixes until a slot has room, as far as possible.

        Returns the number of blocks of ``block_bytes`` that have room.
        """
        while (free := self.slabs.num_free_blocks(block_bytes)) < num_blocks:
            if self.prefixes is None or not self.prefixes.evict_oldest():
                break
        return free

    def allocate(self, block_bytes: int, num_blocks: int) -> HostSlot | None:
        """Return a slot of ``num_blocks`` KV blocks of ``block_bytes``; None if there is no space.

        Prefixes are evicted for the slot.

        Raises ValueError: a block has no bytes, or the number of blocks is negative.
        """
        self.make_room(block_bytes, num_blocks)
        blocks = self.slabs.allocate(block_bytes, num_blocks)
        return None if blocks is None else HostSlot(self, blocks)

    def close(self) -> None:
        if self.table is not None:
            self.table.close()
        if self.budget_bytes:
            libc.munmap(self.address, self.budget_bytes)
        os.close(self.fd)


def _fd_of_shape(former_fd: int | None, shape: CacheShape) -> int:
    """Return ``former_fd`` if its table is of such a cache, else a new memfd."""
    if former_fd is not None:
        with contextlib.suppress(OSError, ValueError):
            PrefixTable(former_fd, shape).close()
            return former_fd
    fd = os.memfd_create("gpupool-kv", os.MFD_CLOEXEC)
    if former_fd is not None:
        os.close(former_fd)
    try:
        os.ftruncate(fd, shape.file_bytes if shape.budget_bytes else 0)
    except OSError:
        os.close(fd)
        raise
    return fd


@dataclass(frozen=True, eq=False, slots=True)
class HostSlot:
    """A slot with the KV of offloaded blocks of one model."""

    cache: KvHostCache
    blocks: Allocation

    @property
    def num_bytes(self) -> int:
        return self.blocks.num_bytes

    def pieces(self) -> list[tuple[int, int]]:
        """Return the slot's memory as ``(address, num_bytes)`` in order, whole blocks in each."""
        return [(self.cache.address + at.offset, at.num_bytes) for at in self.blocks.extents]

    def beside(self, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        return lay(extents, self.pieces())

    def free(self) -> None:
        self.cache.slabs.free(self.blocks)


@dataclass(frozen=True, slots=True)
class Record:
    """Some blocks of an owner, with their keys and places in the KV host cache."""

    number: int
    version: int
    last_use: int
    owner: bytes
    block_bytes: int
    keys: tuple[bytes, ...]
    places: tuple[BlockPlace, ...]


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a KV host cache: with others, places mean other bytes."""

    budget_bytes: int
    slab_bytes: int
    num_ranks: int

    @property
    def num_records(self) -> int:
        """Number of records of the cache's table."""
        wanted = self.budget_bytes // _LEAST_RECORD_BYTES
        return min(max(wanted, _MIN_RECORDS), _MAX_RECORDS)

    @property
    def data_bytes(self) -> int:
        """Bytes of the cache over all ranks, before the table."""
        return self.budget_bytes * self.num_ranks

    @property
    def file_bytes(self) -> int:
        """Bytes of the cache with its table."""
        num_bytes = self.data_bytes + _RECORDS_AT + self.num_records * _RECORD.size
        return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class PrefixTable:
    """The table behind the bytes of a KV host cache in its memfd, for the writer or a reader.

    The writer's methods are for one thread, except ``note_arrival``.

    One process writes the table. Other processes read the table while it changes, and the next
    worker of the device continues the table after the writer's death, so each change is a single
    store: a record counts from the moment when its version is written, and ends when its version
    becomes 0, before its memory is used for anything else. A reader copies bytes and then compares
    the version.
    """

    def __init__(self, fd: int, shape: CacheShape, *, is_new: bool = False) -> None:
        """Map the table of a cache; create the table if the cache ``is_new``.

        Raises ValueError: the cache has other sizes.
        """
        if os.fstat(fd).st_size != shape.file_bytes:
            raise ValueError(f"the KV host cache has not the {shape.file_bytes} bytes of {shape}")
        self.shape = shape
        start = shape.data_bytes // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        self._skip = shape.data_bytes - start
        self._map = mmap.mmap(fd, shape.file_bytes - start, offset=start)
        header = _MAGIC, shape.budget_bytes, shape.slab_bytes, shape.num_ranks, shape.num_records
        found = _HEADER.unpack_from(self._map, self._skip)
        if is_new:
            _HEADER.pack_into(self._map, self._skip, *header)
        elif found != header:
            self._map.close()
            raise ValueError(f"the table is of a KV host cache with other sizes: {found}")
        self._latest_version = self._latest_use = 0
        self._free: list[int] = []  # numbers without a record, for the writer

    def open_for_writing(self) -> list[Record]:
        """Return the records with bytes that have arrived, least recently used first.

        Other records, whose bytes will not arrive any more, are removed.
        """
        versions = dict(self._versions())
        found = [self.read(number) for number in versions]
        records = [record for record in found if record is not None]
        usable = {record.number for record in records}
        for number in versions.keys() - usable:
            _WORD.pack_into(self._map, self._at(number), 0)
        self._free = [
            index for index in reversed(range(self.shape.num_records)) if index not in usable
        ]
        self._latest_version = max(versions.values(), default=0)
        records.sort(key=lambda record: record.last_use)
        self._latest_use = records[-1].last_use if records else 0
        return records

    def add(
        self, owner: bytes, block_bytes: int, keys: Sequence[bytes], places: Sequence[BlockPlace]
    ) -> int | None:
        """Add a record of blocks that will arrive; return its number, None without room."""
        if not self._free:
            return None
        number = self._free.pop()
        at = self._at(number)
        self._latest_version += 1
        self._latest_use += 1
        padding = MAX_BLOCKS - len(keys)
        flat = [part for place in places for part in place] + [0, 0] * padding
        names = [*keys, *[b""] * padding]
        fields = 0, 0, self._latest_use, owner, block_bytes, len(keys)
        _RECORD.pack_into(self._map, at, *fields, *names, *flat)
        _WORD.pack_into(self._map, at, self._latest_version)
        [num_added] = _WORD.unpack_from(self._map, self._skip + _NUM_ADDED_AT)
        ring_at = self._skip + _LATEST_AT + num_added % _NUM_LATEST * _NUMBER.size
        _NUMBER.pack_into(self._map, ring_at, number)
        _WORD.pack_into(self._map, self._skip + _NUM_ADDED_AT, num_added + 1)
        return number

    def note_arrival(self, number: int) -> None:
        """Make a record's bytes usable."""
        _WORD.pack_into(self._map, self._at(number) + _ARRIVED, 1)

    def note_use(self, number: int) -> None:
        """Count a record as used most recently."""
        self._latest_use += 1
        _WORD.pack_into(self._map, self._at(number) + _LAST_USE, self._latest_use)

    def remove(self, number: int) -> None:
        """Remove a record, before its memory is freed."""
        _WORD.pack_into(self._map, self._at(number), 0)
        self._free.append(number)

    @property
    def numbers(self) -> set[int]:
        """The numbers of all records."""
        return {number for number, _ in self._versions()}

    def read(self, number: int) -> Record | None:
        """Return a record whose bytes have arrived, None if there is none."""
        if number >= self.shape.num_records:
            return None
        fields = _RECORD.unpack_from(self._map, self._at(number))
        version, has_arrived, last_use, owner, block_bytes, num_blocks = fields[:6]
        if not version or not has_arrived or not 0 < num_blocks <= MAX_BLOCKS:
            return None
        keys = fields[6 : 6 + num_blocks]
        parts = fields[6 + MAX_BLOCKS : 6 + MAX_BLOCKS + 2 * num_blocks]
        places = tuple(map(BlockPlace, parts[::2], parts[1::2]))
        if not self.is_current(number, version):
            return None  # changed meanwhile
        return Record(number, version, last_use, owner, block_bytes, keys, places)

    def is_current(self, number: int, version: int) -> bool:
        """Return whether a record is still the one that was read."""
        found: int = _WORD.unpack_from(self._map, self._at(number))[0]
        return found == version

    def added_since(self, num_seen: int) -> tuple[Sequence[int], int]:
        """Return the numbers of records added after the first ``num_seen``, and their total.

        May include further records, and records that were removed.
        """
        [total] = _WORD.unpack_from(self._map, self._skip + _NUM_ADDED_AT)
        if total - num_seen >= _NUM_LATEST:
            return [number for number, _ in self._versions()], total
        ring_at = self._skip + _LATEST_AT
        return [
            _NUMBER.unpack_from(self._map, ring_at + number % _NUM_LATEST * _NUMBER.size)[0]
            for number in range(num_seen, total)
        ], total

    def close(self) -> None:
        self._map.close()

    def _versions(self) -> Iterator[tuple[int, int]]:
        start = self._at(0)
        with memoryview(self._map) as view:
            records = view[start : start + self.shape.num_records * _RECORD.size]
            with records:
                found = [version for (version,) in _VERSIONS.iter_unpack(records)]
        return ((number, version) for number, version in enumerate(found) if version)

    def _at(self, number: int) -> int:
        return self._skip + _RECORDS_AT + number * _RECORD.size


class CacheBytes:
    """The mapped bytes of a cache; the kernel allocates memory only where something is written."""

    def __init__(self, fd: int, shape: CacheShape) -> None:
        """Map the bytes of ``fd``, which stays the caller's.

        Raises OSError: the process has too few addresses.
        """
        self.shape = shape
        flags = libc.MAP_SHARED | libc.MAP_NORESERVE
        self._address = libc.mmap(None, shape.data_bytes, libc.PROT_READ_WRITE, flags, fd, 0)

    def copy(
        self, place: BlockPlace, source: CacheBytes, source_place: BlockPlace, num_bytes: int
    ) -> None:
        """Copy a block of ``num_bytes`` on each rank from another cache of the same shape."""
        parts = zip(
            self._addresses(place, num_bytes),
            source._addresses(source_place, num_bytes),
            strict=True,
        )
        for target, address in parts:
            libc.memcpy(target, address, num_bytes)

    def views(self, place: BlockPlace, num_bytes: int) -> list[memoryview]:
        """Return the bytes of a block on each rank, to be read and written."""
        return [libc.view(address, num_bytes) for address in self._addresses(place, num_bytes)]

    def close(self) -> None:
        libc.munmap(self._address, self.shape.data_bytes)

    def _addresses(self, place: BlockPlace, num_bytes: int) -> list[int]:
        shape = self.shape
        offset = place.slab * shape.slab_bytes + place.block * num_bytes
        if not 0 <= offset <= shape.budget_bytes - num_bytes:
            raise ValueError(f"{place} is outside of the KV host cache")
        start, ranks = self._address + offset, range(shape.num_ranks)
        return [start + rank * shape.budget_bytes for rank in ranks]


def owners_of(model: str) -> str:
    """Return the beginning of the names of all KV of a model."""
    return _digest(model)


def owner_of(model: str, identity: str) -> str:
    """Return the name of a model's KV; ``identity`` has all else that decides on the KV."""
    return owners_of(model) + _digest(identity)


def _digest(text: str) -> str:
    return blake3(text.encode()).hexdigest(NUM_DIGITS // 2)
