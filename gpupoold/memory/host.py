"""Host memory shared between processes: weights snapshots and the KV host cache."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from gpupoold.memory import libc
from gpupoold.memory.contracts import Device
from gpupoold.memory.libc import create_memfd
from gpupoold.memory.prefix_table import CacheShape, PrefixTable, Record
from gpupoold.memory.slabs import Allocation, SlabAllocator, slab_bytes_for

_POPULATED = libc.MAP_SHARED | libc.MAP_POPULATE
# Bytes of a large buffer whose pages one of several threads allocates at a time.
_PIECE_BYTES = 64 << 20
_MAX_THREADS = 8


class HostBuffer:
    """A memfd, or a part of a memfd, mapped into this process."""

    def __init__(
        self, fd: int, num_bytes: int, offset: int = 0, *, is_populated: bool = True
    ) -> None:
        """Map ``num_bytes`` of ``fd`` from ``offset`` on; own ``fd``, which a failure closes.

        If not ``is_populated``, the kernel allocates pages when they are first used.
        """
        self.fd = fd
        self.num_bytes = num_bytes
        flags = _POPULATED if is_populated else libc.MAP_SHARED | libc.MAP_NORESERVE
        try:
            self.address = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, flags, fd, offset)
        except OSError:
            os.close(fd)
            raise
        self._is_open = True

    @classmethod
    def create(cls, name: str, num_bytes: int) -> HostBuffer:
        """Create a zeroed buffer.

        Raises:
            OSError: the machine has too little free memory.
        """
        return cls(create_memfd(name, num_bytes, touch_pages), num_bytes)

    def close(self) -> None:
        """Unmap and close; the bytes stay while another process has the memfd open.

        A second call does nothing: the address and the descriptor may have been reused.
        """
        if not self._is_open:
            return
        self._is_open = False
        libc.munmap(self.address, self.num_bytes)
        os.close(self.fd)


def touch_pages(fd: int, num_bytes: int) -> None:
    """Allocate and zero all pages of a memfd, on several cores.

    Called before pinning: one thread, such as the thread of the pinning call, needs at least 0.2 s
    per GB (2.5 s in a virtual machine with untouched memory). The threads inherit the caller's
    memory policy. The kernel is asked for huge pages, which it gives to shared memory only if
    ``/sys/kernel/mm/transparent_hugepage/shmem_enabled`` is ``advise`` or more: pinning takes
    a driver's locks once for each page.

    Raises:
        OSError: the machine has too little memory.
    """

    def touch(offset: int) -> None:
        length = min(_PIECE_BYTES, num_bytes - offset)
        address = libc.mmap(None, length, libc.PROT_READ_WRITE, libc.MAP_SHARED, fd, offset)
        try:
            with contextlib.suppress(OSError):  # a kernel without huge pages
                libc.madvise(address, length, libc.MADV_HUGEPAGE)
            libc.madvise(address, length, libc.MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14
                raise
            libc.munmap(
                libc.mmap(None, length, libc.PROT_READ_WRITE, _POPULATED, fd, offset), length
            )
        finally:
            libc.munmap(address, length)

    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "touch") as threads:
        for _ in threads.map(touch, range(0, num_bytes, _PIECE_BYTES)):
            pass


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
    The kernel allocates the buffer's memory only when slots are first used.

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
        """Pin the whole buffer for copies of ``device``; allocates the memory."""
        if not self.budget_bytes:
            return
        if not device.is_host_addressable:
            touch_pages(self.fd, self.shape.data_bytes)
        device.pin(self.address, self.budget_bytes)
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
        free = self.slabs.num_free_blocks(block_bytes)
        if self.prefixes is None:
            return free
        return free + self.prefixes.evictable_bytes // block_bytes

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

        Raises:
            ValueError: a block has no bytes, or the number of blocks is negative.
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
        """Free the slot.

        Raises:
            ValueError: the slot is free already.
        """
        self.cache.slabs.free(self.blocks)
