"""An emulated device on the CPU: a memfd is the memory, and mapping moves page-table entries.

Limits, mapping and copies are real; only the address space is shared with the host. All pages are
mapped once at a *home* range. Mapping a page elsewhere moves the page-table entries there with
``mremap``, unmapping moves the entries back: about 1 ms for 300 MB, whereas ``mmap`` with
``MAP_POPULATE`` and ``munmap`` take as long as the copy. If both addresses are equal modulo the
size that a page table maps, the kernel moves the table instead of its entries, in a tenth of the
time.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path

from gpupoold.memory import libc
from gpupoold.memory.device import Copy, CopyStream, Device, Direction, Fence, Unpinned
from gpupoold.memory.libc import create_memfd
from gpupoold.memory.pages import PageRun
from gpupoold.memory.pinning import IdleLock, PinnedMemory, StagedCopies, StagedCopyStream
from gpupoold.units import format_bytes

_UNMAPPED = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS | libc.MAP_NORESERVE
_HOME = libc.MAP_SHARED | libc.MAP_POPULATE
_PARALLEL_BYTES = 8 << 20
_MAX_PAGES = 16384
_TABLE_BYTES = 2 << 20  # with pages of 4 KiB
# Time to unpin over the time to pin, as of the kernel's part: 14 ms of 43 for 1 GiB.
_UNPIN_SHARE = 1 / 3


def default_page_bytes(device_bytes: int) -> int:
    """Return 64 KiB, more for large devices: a process may have only 65,530 mappings.

    At worst each page takes two mappings, for the page and for the gap behind; torch has
    thousands of mappings.
    """
    page_bytes = 64 << 10
    while device_bytes // page_bytes > _MAX_PAGES:
        page_bytes *= 2
    return page_bytes


class ModelledDriver:
    """A modelled GPU driver, which pins host memory at ``pin_bytes_per_s`` under a lock.

    Launches wait for the lock, which all processes share that open the files ``lock``, in the order
    of their arrival. The driver refuses more than ``limit_bytes``, unless negative.
    """

    def __init__(
        self, pin_bytes_per_s: float, limit_bytes: int = -1, lock: Path | None = None
    ) -> None:
        self._bytes_per_s = pin_bytes_per_s
        self._limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}
        # The first has who waits next for the second, so that a waiting launch comes before the
        # next piece, as in the kernel's fair locks.
        self._locks = threading.Lock(), threading.Lock()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        names = [] if lock is None else [lock.with_suffix(".queue"), lock]
        self._fds = [os.open(name, flags, 0o600) for name in names]

    def bind_thread(self) -> None:
        """Do nothing: every thread may make the other calls."""

    def register_host(self, address: int, num_bytes: int) -> None:
        if 0 <= self._limit_bytes < sum(self._sizes.values()) + num_bytes:
            limit = format_bytes(self._limit_bytes)
            raise RuntimeError(f"the modelled driver pins at most {limit}")
        with self._locked():
            time.sleep(num_bytes / self._bytes_per_s)
        self._sizes[address] = num_bytes

    def unregister_host(self, address: int) -> None:
        with self._locked():
            time.sleep(_UNPIN_SHARE * self._sizes.pop(address) / self._bytes_per_s)

    def wait(self) -> None:
        """Wait as a launch does."""
        with self._locked():
            pass

    def close(self) -> None:
        for fd in self._fds:
            os.close(fd)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._take(0)
        self._take(1)
        self._give(0)
        try:
            yield
        finally:
            self._give(1)

    def _take(self, number: int) -> None:
        self._locks[number].acquire()
        if self._fds:
            fcntl.flock(self._fds[number], fcntl.LOCK_EX)

    def _give(self, number: int) -> None:
        if self._fds:
            fcntl.flock(self._fds[number], fcntl.LOCK_UN)
        self._locks[number].release()


class EmulatedDevice(Device):
    """A device with ``device_bytes`` (rounded down to pages) of memory in a memfd.

    Copies to and from the host, in each direction, take as long as over a link of
    ``link_bytes_per_s``; without a link (0), as long as the host's cores take. Kernels and copies
    are synchronous, and torch uses host memory, so that fences and the release of memory need no
    work. With a modelled ``driver`` host memory is pinned and copied as on a GPU; otherwise copies
    are equally fast from all host memory.

    Raises OSError: the machine has too little free memory, or a kernel before 5.13, which cannot
    move page tables of shared memory.
    """

    is_host_addressable = True

    def __init__(
        self,
        device_bytes: int,
        page_bytes: int | None = None,
        link_bytes_per_s: float = 0.0,
        driver: ModelledDriver | None = None,
        idle: IdleLock | None = None,
    ) -> None:
        super().__init__()
        self.has_link = link_bytes_per_s > 0
        self._links = {
            direction: ModelledLink(link_bytes_per_s or math.inf) for direction in Direction
        }
        self.page_bytes = page_bytes or default_page_bytes(device_bytes)
        self.num_pages = device_bytes // self.page_bytes
        if _TABLE_BYTES % self.page_bytes == 0:
            self.table_pages = _TABLE_BYTES // self.page_bytes
        num_bytes = self.num_pages * self.page_bytes
        with contextlib.ExitStack() as undo:
            self._fd = create_memfd("gpupool-device", num_bytes)
            undo.callback(os.close, self._fd)
            self._home = self.reserve(self.num_pages)
            undo.callback(self.release, self._home, self.num_pages)
            fixed = _HOME | libc.MAP_FIXED
            libc.mmap(self._home, num_bytes, libc.PROT_READ_WRITE, fixed, self._fd, 0)
            undo.pop_all()
        self._copier = ThreadPoolExecutor(1, "copier")
        self._driver = driver
        self._pinned = None if driver is None else PinnedMemory(driver, idle)
        self._staged = StagedCopies(self.open_copy_stream)

    def reserve(self, num_pages: int) -> int:
        """Reserve addresses from the first address of a page table on."""
        num_bytes = num_pages * self.page_bytes
        start = libc.mmap(None, num_bytes + _TABLE_BYTES, libc.PROT_NONE, _UNMAPPED, -1, 0)
        before = -start % _TABLE_BYTES
        if before:
            libc.munmap(start, before)
        libc.munmap(start + before + num_bytes, _TABLE_BYTES - before)
        return start + before

    def release(self, address: int, num_pages: int) -> None:
        libc.munmap(address, num_pages * self.page_bytes)

    def map(self, address: int, runs: list[PageRun]) -> None:
        assert runs, "a GPU's driver refuses to map nothing"
        self.wait_for_driver()
        at = address
        for index, run in enumerate(runs):
            num_bytes = run.num_pages * self.page_bytes
            try:
                libc.move_pages(self._home + run.first * self.page_bytes, at, num_bytes)
            except OSError:
                if index:
                    self.unmap(address, runs[:index])
                raise
            at += num_bytes

    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        for start, runs in mappings:
            address = start
            for run in runs:
                num_bytes = run.num_pages * self.page_bytes
                libc.move_pages(address, self._home + run.first * self.page_bytes, num_bytes)
                address += num_bytes
            # The remaining mapping would silently map the old pages again when touched.
            fixed = _UNMAPPED | libc.MAP_FIXED
            libc.mmap(start, address - start, libc.PROT_NONE, fixed, -1, 0)

    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        started_s = time.perf_counter()
        self.map(address, runs)
        mapped_s = time.perf_counter()
        num_bytes = sum(run.num_pages for run in runs) * self.page_bytes
        if source is None:
            libc.memset(address, 0, num_bytes)
        else:
            self.copy_in(address, source, num_bytes)
        self.spent.map_s += mapped_s - started_s
        self.spent.copy_s += time.perf_counter() - mapped_s

    def zero(self, address: int, num_bytes: int) -> None:
        libc.memset(address, 0, num_bytes)

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        self._copy(address, source, num_bytes, Direction.IN)

    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        self._copy(target, address, num_bytes, Direction.OUT)

    def open_copy_stream(self, direction: Direction) -> CopyStream:
        own = LinkCopyStream(self._links[direction])
        if self._pinned is None:
            return own
        return StagedCopyStream(own, direction, self._pinned, self.copy_batch_bytes)

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        num_streams = 1 if self.has_link else _num_copiers()
        copy_streams = [self.open_copy_stream(direction) for _ in range(num_streams)]
        for copy_stream in copy_streams:
            if isinstance(copy_stream, StagedCopyStream):
                copy_stream.open_buffers()
        return copy_streams

    def pin(self, address: int, num_bytes: int) -> None:
        if self._pinned is not None:
            self._pinned.pin(address, num_bytes)

    def pin_later(self, address: int, num_bytes: int) -> None:
        if self._pinned is not None:
            self._pinned.pin_later(address, num_bytes)

    def unpin(self, address: int, num_bytes: int) -> None:
        if self._pinned is not None:
            self._pinned.unpin(address, num_bytes)

    def unpin_later(self, address: int, num_bytes: int, then: Callable[[], None]) -> None:
        if self._pinned is None:
            super().unpin_later(address, num_bytes, then)
        else:
            self._pinned.unpin_later(address, num_bytes, then)

    def set_live(self, is_live: bool) -> None:
        if self._pinned is not None:
            self._pinned.idle.set_live(is_live)

    def unpinned(self) -> Unpinned:
        return Unpinned() if self._pinned is None else self._pinned.unpinned

    def watch_unpinned(self, on_change: Callable[[], None]) -> None:
        if self._pinned is not None:
            self._pinned.on_change = on_change

    def wait_for_driver(self) -> None:
        if self._driver is not None:
            self._driver.wait()

    def close(self) -> None:
        self._copier.shutdown()
        self._staged.close()
        if self._pinned is not None:
            self._pinned.close()
        if self._driver is not None:
            self._driver.close()
        libc.munmap(self._home, self.num_pages * self.page_bytes)
        os.close(self._fd)

    def _copy(self, target: int, source: int, num_bytes: int, direction: Direction) -> None:
        if self._pinned is not None:
            self._staged.copy(direction, Copy(target, source, num_bytes))
            return
        if self.has_link:
            self._links[direction].copy(target, source, num_bytes)
            return
        if num_bytes < _PARALLEL_BYTES:
            libc.memcpy(target, source, num_bytes)
            return
        half = num_bytes // 2  # two threads, unlike one, saturate a small machine's memory bus
        other = self._copier.submit(libc.memcpy, target + half, source + half, num_bytes - half)
        libc.memcpy(target, source, half)
        other.result()


def _num_copiers() -> int:
    """Return the number of copying threads: one per core except the stepping thread's, 1 or 2.

    With one thread too many, a copy waits milliseconds for a core.
    """
    return max(1, min(2, len(os.sched_getaffinity(0)) - 1))


@dataclass(eq=False, slots=True)
class ModelledLink:
    """One direction of a link between host and device, shared by all threads.

    Bytes are copied at once by the calling thread, and count as arrived when the link would have
    transferred these and all earlier bytes.
    """

    bytes_per_s: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _free_at_s: float = field(default=0.0, init=False)

    def begin(self, copies: Sequence[Copy]) -> float:
        """Make the copies; return the time of their arrival."""
        began_s = self.clock()
        for target, source, num_bytes in copies:
            libc.memcpy(target, source, num_bytes)
        num_bytes = sum(copy.num_bytes for copy in copies)
        with self._lock:
            self._free_at_s = max(self._free_at_s, began_s) + num_bytes / self.bytes_per_s
            return self._free_at_s

    def wait_until(self, arrival_s: float) -> None:
        """Return at the time of an arrival."""
        while (left_s := arrival_s - self.clock()) > 0:
            self.sleep(left_s)

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Copy, and return at the time of the arrival."""
        self.wait_until(self.begin([Copy(target, source, num_bytes)]))


@dataclass(eq=False, slots=True)
class LinkCopyStream:
    """A copy stream over a :class:`ModelledLink`."""

    link: ModelledLink
    _numbers: Iterator[int] = field(default_factory=partial(count, 1), init=False)
    _arrivals_s: dict[int, float] = field(default_factory=dict, init=False)

    def fence(self) -> int:
        """Return at once: kernels on the CPU are synchronous."""
        return 0

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        number = next(self._numbers)
        self._arrivals_s[number] = self.link.begin(copies)
        return number

    def wait(self, batch: int) -> None:
        arrived = [number for number in self._arrivals_s if number <= batch]
        self.link.wait_until(max((self._arrivals_s.pop(page) for page in arrived), default=0.0))

    def close(self) -> None:
        """Return when all copies have arrived."""
        self.wait(next(self._numbers))
