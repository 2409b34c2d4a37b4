"""Host memory shared between processes: weight images and the KV host cache."""

from __future__ import annotations

import os

from gpupoold.memory import libc
from gpupoold.memory.contracts import Device, PageRun
from gpupoold.memory.memfd import create_memfd
from gpupoold.memory.pages import PagePool

_POPULATED = libc.MAP_SHARED | libc.MAP_POPULATE


class HostBuffer:
    """A memfd mapped into this process, its pages touched beforehand."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Map ``num_bytes`` of ``fd``, which this object owns from now on, even if it fails."""
        self.fd = fd
        self.num_bytes = num_bytes
        try:
            self.address = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, _POPULATED, fd, 0)
        except OSError:
            os.close(fd)
            raise
        self._is_open = True

    @classmethod
    def create(cls, name: str, num_bytes: int) -> HostBuffer:
        """A new zeroed buffer.

        Raises:
            OSError: the machine has less memory free than that.
        """
        return cls(create_memfd(name, num_bytes), num_bytes)

    def close(self) -> None:
        """Unmap and close; the bytes live on while another process has the memfd.

        Closing twice is harmless: the address and descriptor may be others' by then.
        """
        if not self._is_open:
            return
        self._is_open = False
        libc.munmap(self.address, self.num_bytes)
        os.close(self.fd)


class KvHostCache:
    """Host slots for the KV of paused requests, within a byte budget.

    A slot is a list of page runs of the buffer; the buffer's memory is taken
    from the system only as slots are first used.
    """

    def __init__(self, budget_bytes: int, slot_page_bytes: int) -> None:
        self._page_bytes = slot_page_bytes
        self._pool = PagePool(budget_bytes // slot_page_bytes)
        self._fd = os.memfd_create("gpupool-kv", os.MFD_CLOEXEC)
        self._num_bytes = self._pool.num_pages * slot_page_bytes
        os.ftruncate(self._fd, self._num_bytes)
        shared = libc.MAP_SHARED | libc.MAP_NORESERVE
        self._address = (
            libc.mmap(None, self._num_bytes, libc.PROT_READ_WRITE, shared, self._fd, 0)
            if self._num_bytes
            else 0
        )

    def pin(self, device: Device) -> None:
        """Pin the whole buffer for copies to and from ``device``, which takes its memory now."""
        if self._num_bytes:
            device.pin(self._address, self._num_bytes)

    def unpin(self, device: Device) -> None:
        """Undo ``pin``; before ``close``."""
        if self._num_bytes:
            device.unpin(self._address, self._num_bytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in slots."""
        return (self._pool.num_pages - self._pool.num_free) * self._page_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes a new slot could have."""
        return self._pool.num_free * self._page_bytes

    def allocate(self, num_bytes: int) -> HostSlot:
        """A slot of at least ``num_bytes``.

        Raises:
            OutOfPages: the budget is used up; ask ``free_bytes`` before.
        """
        return HostSlot(self, self._pool.allocate(-(-num_bytes // self._page_bytes)))

    def free(self, slot: HostSlot) -> None:
        """Give a slot back."""
        self._pool.free(slot.runs)

    def pieces(self, slot: HostSlot) -> list[tuple[int, int]]:
        """The slot's memory as ``(address, num_bytes)`` pieces in order."""
        size = self._page_bytes
        return [(self._address + run.first * size, run.num_pages * size) for run in slot.runs]

    def check_integrity(self) -> None:
        """Raise AssertionError when the slots' bookkeeping is off."""
        self._pool.check_integrity()

    def close(self) -> None:
        """Unmap; slots are gone."""
        if self._num_bytes:
            libc.munmap(self._address, self._num_bytes)
        os.close(self._fd)


class HostSlot:
    """Where one paged-out KV chunk lives."""

    __slots__ = ("_cache", "runs")

    def __init__(self, cache: KvHostCache, runs: list[PageRun]) -> None:
        self._cache = cache
        self.runs = runs

    def pieces(self) -> list[tuple[int, int]]:
        """See :meth:`KvHostCache.pieces`."""
        return self._cache.pieces(self)

    def free(self) -> None:
        """Give the slot back to its cache."""
        self._cache.free(self)
