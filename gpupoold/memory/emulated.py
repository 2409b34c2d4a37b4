"""A small real device on the CPU: a memfd is the memory, ``MAP_FIXED`` the page mapper.

Limits, mapping and copies are real; only the address space is shared with the
host. Nothing else in the project calls ``mmap`` on a device.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor

from gpupoold.memory import libc
from gpupoold.memory.contracts import Device, PageRun
from gpupoold.memory.pages import split_runs

_UNMAPPED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
_MAPPED = libc.MAP_SHARED | libc.MAP_FIXED | libc.MAP_POPULATE
_FILL_BYTES = 4 << 20
# Two threads saturate the memory bus of a small box; mapping (page tables) and
# copying (bytes) of different pieces then overlap.
_NUM_FILLERS = 2
_PARALLEL_BYTES = 8 << 20


def default_page_bytes(device_bytes: int) -> int:
    """64 KiB, more on large devices: a process may have only 65,530 mappings."""
    page_bytes = 64 << 10
    while device_bytes // page_bytes > 32768:
        page_bytes *= 2
    return page_bytes


class EmulatedDevice(Device):
    """``device_bytes`` (rounded down to pages) of memory in a memfd.

    Raises:
        OSError: the machine has less memory free than that.
    """

    is_host_addressable = True

    def __init__(self, device_bytes: int, page_bytes: int | None = None) -> None:
        super().__init__()
        self.page_bytes = page_bytes or default_page_bytes(device_bytes)
        self.num_pages = device_bytes // self.page_bytes
        self._fd = os.memfd_create("gpupool-device", os.MFD_CLOEXEC)
        # The pages are made now, as on a GPU; a switch only maps them.
        os.posix_fallocate(self._fd, 0, self.num_pages * self.page_bytes)
        self._fillers = ThreadPoolExecutor(_NUM_FILLERS, "filler")

    def reserve(self, num_pages: int) -> int:
        """See :meth:`Device.reserve`."""
        return libc.mmap(None, num_pages * self.page_bytes, libc.PROT_NONE, _UNMAPPED, -1, 0)

    def release(self, address: int, num_pages: int) -> None:
        """See :meth:`Device.release`."""
        libc.munmap(address, num_pages * self.page_bytes)

    def map(self, address: int, runs: list[PageRun]) -> None:
        """See :meth:`Device.map`."""
        for run in runs:
            num_bytes = run.num_pages * self.page_bytes
            offset = run.first * self.page_bytes
            libc.mmap(address, num_bytes, libc.PROT_READ_WRITE, _MAPPED, self._fd, offset)
            address += num_bytes

    def unmap(self, address: int, num_pages: int) -> None:
        """See :meth:`Device.unmap`."""
        num_bytes = num_pages * self.page_bytes
        libc.mmap(address, num_bytes, libc.PROT_NONE, _UNMAPPED | libc.MAP_FIXED, -1, 0)

    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """See :meth:`Device.map_and_fill`."""
        num_pages = sum(run.num_pages for run in runs)
        if num_pages * self.page_bytes < _PARALLEL_BYTES:
            self._fill(address, runs, source)
            return
        half = num_pages // 2
        head, tail = split_runs(runs, half)
        skip = half * self.page_bytes
        other = self._fillers.submit(
            self._fill, address + skip, tail, None if source is None else source + skip
        )
        self._fill(address, head, source)
        other.result()

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """See :meth:`Device.copy_in`."""
        libc.memcpy(address, source, num_bytes)

    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """See :meth:`Device.copy_out`."""
        libc.memcpy(target, address, num_bytes)

    def synchronize(self) -> None:
        """Copies are synchronous here."""

    def close(self) -> None:
        """See :meth:`Device.close`."""
        self._fillers.shutdown()
        os.close(self._fd)

    def _fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        pages_per_piece = max(1, _FILL_BYTES // self.page_bytes)
        while runs:
            piece, runs = split_runs(runs, pages_per_piece)
            num_bytes = sum(run.num_pages for run in piece) * self.page_bytes
            started_s = time.perf_counter()
            self.map(address, piece)
            mapped_s = time.perf_counter()
            if source is None:
                libc.memset(address, 0, num_bytes)
            else:
                libc.memcpy(address, source, num_bytes)
                source += num_bytes
            self.spent.map_s += mapped_s - started_s
            self.spent.copy_s += time.perf_counter() - mapped_s
            address += num_bytes
