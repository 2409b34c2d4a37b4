"""An NVIDIA GPU's memory: pages created once, mapped and filled when a model is switched in.

Order between copies and the engines' kernels:

- pages change their owner only after the last kernels of their model, and after all kernels
  launched so far while the model may launch more; pages are copied out after all kernels launched
  so far;
- the mapping of a paused model's pages may stay until the next mapping at its addresses, and is
  removed beside copies and other mappings;
- copies into an address range are visible after ``synchronize``; zeros need no call, because the
  compute streams wait for them;
- copies in and copies out have a stream each, so that they can overlap;
- a copy stream has a separate CUDA stream, and its user waits for copies before unmapping their
  pages or unpinning their host memory: no call here waits for copy streams.

One thread of one process makes all page-table calls of a GPU, because concurrent calls hang or
crash the driver (vllm#36753). A worker owns its GPU, and the worker's turn loop makes the calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from gpupoold.errors import Failed
from gpupoold.memory.cuda.driver import CudaCopyStream, CudaDriver, CudaError
from gpupoold.memory.device import Copy, CopyStream, Device, Direction, Fence, Unpinned
from gpupoold.memory.libc import node_of
from gpupoold.memory.pages import PageRun, split_runs
from gpupoold.memory.pinning import IdleLock, PinnedMemory, StagedCopies, StagedCopyStream
from gpupoold.units import format_bytes

# A compromise: switches are faster with large pages, KV wastes less in small pages. The driver
# works page by page, however many pages a call covers (pytorch#96995): on an A100, mapping a page
# with access takes 40 us and unmapping 26 us (kvcached). With the smallest pages, 2 MiB, 16 GB
# would take 0.2 s to evict and 0.3 s to map, as long as the copy; with 8 MiB a quarter of the time.
# A page holds the KV of 64 tokens of an 8B model. But where the attention backend puts layers
# outermost, a KV extent takes a page per layer: 256 MiB for 32 layers, and 1 GiB with pages of
# 32 MiB. Pages are created only at start-up (0.2 ms each, 4 s for 140 GB).
_PAGE_BYTES = 8 << 20
# A piece is copied while the next piece is mapped: 5 ms on PCIe 5, which hides the mapping.
_PIECE_BYTES = 256 << 20
# With 55 GB/s a batch of 8 MiB takes 0.15 ms, and each of its calls may wait 0.1 ms for the
# interpreter: over a modelled link batches of 8 MiB reach 37 GB/s beside busy Python, of 32 MiB 54.
_BATCH_BYTES = 32 << 20
# During a load a layer at a time is in the checkpoint's format and in the kernels' format.
_LOAD_SLACK_BYTES = 1 << 30


class CudaDevice(Device):
    """Memory of one GPU in the device's primary context, which torch uses too.

    ``device_bytes`` caps the memory taken (0: all free memory), ``reserve_bytes`` stay free for
    torch in any case. ``compute_streams`` returns the streams of the engines' kernels and is
    called on every use. ``page_bytes`` is a multiple of the device's granularity.

    Raises:
        Failed: no page fits, or ``page_bytes`` cannot be mapped.
        CudaError: a call of the driver failed, also in any method.
    """

    is_host_addressable = False
    load_slack_bytes = _LOAD_SLACK_BYTES
    copy_batch_bytes = _BATCH_BYTES
    piece_bytes = _PIECE_BYTES

    def __init__(
        self,
        device_index: int,
        device_bytes: int,
        reserve_bytes: int,
        page_bytes: int | None = None,
        driver: CudaDriver | None = None,
        compute_streams: Callable[[], Iterable[int]] = lambda: (0,),  # the legacy default stream
        idle: IdleLock | None = None,
    ) -> None:
        super().__init__()
        self._driver = CudaDriver() if driver is None else driver
        self._compute_streams = compute_streams
        self._handles: list[int | None] = []  # by page; None while the page is released
        self.pinned = PinnedMemory(self._driver, idle)
        self._staged = StagedCopies(partial(self._open_copy_stream, is_bound=True))
        self._stale = StaleMappings(self._driver.unmap)
        self._driver.open(device_index)
        try:
            self.pci_bus_id = self._driver.pci_bus_id()
            self.pinned.numa_node = node_of(self.pci_bus_id)
            self.rank_nodes = (self.pinned.numa_node,)
            granularity = self._driver.granularity()
            self.page_bytes = page_bytes or max(_PAGE_BYTES, granularity)
            self.num_pages = self._plan(granularity, device_bytes, reserve_bytes)
            self._handles = [None] * self.num_pages
            self._make(range(self.num_pages))
            self._in_stream = self._driver.create_stream()
            self._out_stream = self._driver.create_stream()
            self._filled = self._driver.create_event()
        except BaseException:
            self._release(range(len(self._handles)))
            self._driver.close()
            raise
        self._pages_per_piece = max(1, self.piece_bytes // self.page_bytes)

    def free_bytes(self) -> int:
        """Return the free device memory in bytes, the unused part of the reserve."""
        return self._driver.memory_info()[0]

    def reserve(self, num_pages: int) -> int:
        """Reserve addresses.

        Raises Failed: the driver has too few addresses left, as WSL's.
        """
        num_bytes = num_pages * self.page_bytes
        try:
            return self._driver.reserve_addresses(num_bytes, self.page_bytes)
        except CudaError as error:
            if error.code != "CUDA_ERROR_OUT_OF_MEMORY":
                raise
            what = f"the GPU's driver cannot reserve {format_bytes(num_bytes)} of addresses"
            hint = "lower memory.engines, so that fewer models have engines"
            raise Failed(f"{what}: {error}", hint) from error

    def release(self, address: int, num_pages: int) -> None:
        self._stale.remove_at(address, num_pages * self.page_bytes)
        self._driver.free_addresses(address, num_pages * self.page_bytes)

    def map(self, address: int, runs: list[PageRun]) -> None:
        """Map the runs; a page may be mapped at several addresses."""
        self._map(address, runs)
        self._stale.remove_some(_num_pages(runs) * self.page_bytes)

    def _map(self, address: int, runs: list[PageRun]) -> None:
        self._stale.remove_at(address, _num_pages(runs) * self.page_bytes)
        at = address
        try:
            for run in runs:
                for handle in self._handles[run.first : run.end]:
                    assert handle is not None, f"{run} is released"
                    self._driver.map(at, self.page_bytes, handle)
                    at += self.page_bytes
            self._driver.allow_access(address, at - address)
        except CudaError:
            if at > address:
                self._driver.unmap(address, at - address)
            raise

    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        """Unmap after waiting for the pages' users.

        Mappings of a paused model are removed later, beside other work: a wait for the running
        model's step would end the overlap of that step with this work.
        """
        if last_use is None:
            self._wait_for_compute()
        else:
            last_use.wait()
        self.synchronize()
        remove = self._driver.unmap if last_use is None else self._stale.add
        for address, runs in mappings:
            remove(address, _num_pages(runs) * self.page_bytes)

    def open_fence(self) -> Fence:
        return CudaFence(self._driver, self._compute_streams)

    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """Map and fill runs; a piece is mapped during the copy of the previous piece."""
        at, left = address, runs
        try:
            while left:
                piece, left = split_runs(left, self._pages_per_piece)
                num_bytes = _num_pages(piece) * self.page_bytes
                started_s = time.perf_counter()
                self._map(at, piece)
                mapped_s = time.perf_counter()
                at += num_bytes
                self._fill(at - num_bytes, source, num_bytes)
                source = None if source is None else source + num_bytes
                self.spent.map_s += mapped_s - started_s
                self._stale.remove_some(num_bytes)
                self.spent.copy_s += time.perf_counter() - mapped_s
            if source is None:
                self._let_compute_wait()
        except CudaError:
            if at > address:
                mapped, _ = split_runs(runs, (at - address) // self.page_bytes)
                self.unmap(address, mapped)
            raise

    def zero(self, address: int, num_bytes: int) -> None:
        """Set bytes to zero. No kernel may still use the bytes, because the call does not wait."""
        if num_bytes:
            self._driver.fill(address, 0, num_bytes, self._in_stream)
            self._let_compute_wait()

    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        self._copy(Direction.IN, address, source, num_bytes)

    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """Copy to the host, after the kernels launched earlier have finished."""
        self._wait_for_compute()
        self._copy(Direction.OUT, target, address, num_bytes)

    def _copy(self, direction: Direction, target: int, source: int, num_bytes: int) -> None:
        if direction is Direction.IN:
            host, copy, stream = source, self._driver.copy_in, self._in_stream
        else:
            host, copy, stream = target, self._driver.copy_out, self._out_stream
        for offset, length, is_pinned in self.pinned.split(host, num_bytes):
            part = Copy(target + offset, source + offset, length)
            if is_pinned:
                copy(*part, stream)
            else:
                self._staged.copy(direction, part)

    def open_copy_stream(self, direction: Direction) -> CopyStream:
        return self._open_copy_stream(direction)

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        """Open a copy stream whose buffers are pinned before models' memory."""
        copy_stream = self._open_copy_stream(direction)
        copy_stream.open_buffers()
        return [copy_stream]

    def synchronize(self) -> None:
        """Wait for the copies started earlier; the wait counts as copy time."""
        started_s = time.perf_counter()
        self._driver.synchronize_stream(self._in_stream)
        self._driver.synchronize_stream(self._out_stream)
        self.spent.copy_s += time.perf_counter() - started_s

    def pin(self, address: int, num_bytes: int) -> None:
        self.pinned.pin(address, num_bytes)

    def pin_later(self, address: int, num_bytes: int) -> None:
        self.pinned.pin_later(address, num_bytes)

    def stage_far_memory(self) -> None:
        self.pinned.stages_far = True

    def set_live(self, is_live: bool) -> None:
        self.pinned.idle.set_live(is_live)

    def unpinned(self) -> Unpinned:
        return self.pinned.unpinned

    def watch_unpinned(self, on_change: Callable[[], None]) -> None:
        self.pinned.on_change = on_change

    def unpin(self, address: int, num_bytes: int) -> None:
        """Unpin a range, after the copies started earlier have finished.

        Raises ValueError: the range is another than that of ``pin``.
        """
        self.synchronize()
        self.pinned.unpin(address, num_bytes)

    def unpin_later(self, address: int, num_bytes: int, then: Callable[[], None]) -> None:
        self.synchronize()
        self.pinned.unpin_later(address, num_bytes, then)

    def release_memory(self, runs: list[PageRun]) -> None:
        self._stale.remove_all()  # memory with a mapping would not become free
        assert all(self._handles[page] is not None for page in _pages(runs)), "released already"
        self._release(_pages(runs))

    def reclaim(self, runs: list[PageRun]) -> None:
        self._make(_pages(runs))

    def close(self) -> None:
        self._wait_for_compute()
        self.synchronize()
        self._stale.remove_all()
        self._staged.close()
        self.pinned.close()
        self._driver.destroy_event(self._filled)
        self._driver.destroy_stream(self._in_stream)
        self._driver.destroy_stream(self._out_stream)
        self._release(range(self.num_pages))
        self._driver.close()

    def _plan(self, granularity: int, device_bytes: int, reserve_bytes: int) -> int:
        if self.page_bytes % granularity:
            raise Failed(
                f"page_bytes is {format_bytes(self.page_bytes)}, not a multiple of "
                f"{format_bytes(granularity)}, the smallest page this GPU can map",
                "change page_bytes of the device in the configuration",
            )
        free_bytes, total_bytes = self._driver.memory_info()
        usable_bytes = free_bytes - reserve_bytes
        if device_bytes:
            usable_bytes = min(usable_bytes, device_bytes)
        if usable_bytes < self.page_bytes:
            raise Failed(
                f"the GPU has {format_bytes(free_bytes)} of {format_bytes(total_bytes)} free, and "
                f"memory.reserve keeps {format_bytes(reserve_bytes)} free: no page is left",
                "end other users of the GPU or lower memory.reserve",
            )
        return usable_bytes // self.page_bytes

    def _make(self, pages: Iterable[int]) -> None:
        """Create physical memory for pages without memory.

        Raises CudaError: other users have the memory; memory created by this call is freed.
        """
        made: list[int] = []
        try:
            for page in pages:
                assert self._handles[page] is None, f"page {page} exists"
                self._handles[page] = self._driver.create(self.page_bytes)
                made.append(page)
        except CudaError:
            self._release(made)
            raise

    def _release(self, pages: Iterable[int]) -> None:
        for page in pages:
            handle = self._handles[page]
            if handle is not None:
                self._driver.release(handle)
                self._handles[page] = None

    def _fill(self, address: int, source: int | None, num_bytes: int) -> None:
        if source is None:
            self._driver.fill(address, 0, num_bytes, self._in_stream)
        else:
            self.copy_in(address, source, num_bytes)

    def _open_copy_stream(
        self, direction: Direction, *, is_bound: bool = False
    ) -> StagedCopyStream:
        own = CudaCopyStream(self._driver, direction, self._compute_streams, is_bound=is_bound)
        return StagedCopyStream(own, direction, self.pinned, self.copy_batch_bytes)

    def _wait_for_compute(self) -> None:
        for stream in self._compute_streams():
            self._driver.synchronize_stream(stream)

    def _let_compute_wait(self) -> None:
        """Make later kernels wait for the work already queued on the copy-in stream."""
        self._driver.record_event(self._filled, self._in_stream)
        for stream in self._compute_streams():
            self._driver.wait_event(stream, self._filled)


def _num_pages(runs: list[PageRun]) -> int:
    return sum(run.num_pages for run in runs)


def _pages(runs: list[PageRun]) -> Iterator[int]:
    return (page for run in runs for page in range(run.first, run.end))


class CudaFence(Fence):
    """Events on all compute streams; every method raises ``CudaError``. For one thread."""

    def __init__(self, driver: CudaDriver, compute_streams: Callable[[], Iterable[int]]) -> None:
        self._driver = driver
        self._compute_streams = compute_streams
        self._events: list[int] = []
        self._num_recorded = 0

    def record(self) -> None:
        self._num_recorded = 0
        for stream in self._compute_streams():
            if self._num_recorded == len(self._events):
                self._events.append(self._driver.create_host_event())
            self._driver.record_event(self._events[self._num_recorded], stream)
            self._num_recorded += 1

    def wait(self) -> None:
        for event in self._events[: self._num_recorded]:
            self._driver.synchronize_event(event)
        self._num_recorded = 0  # the moment has passed

    def close(self) -> None:
        for event in self._events:
            self._driver.destroy_event(event)
        self._events.clear()
        self._num_recorded = 0


class StaleMappings:
    """Mapped ranges without an owner; ``unmap(address, num_bytes)`` removes mappings.

    The driver unmaps page by page: 36 ms for an 8B model. A page may be mapped at several
    addresses, so the next owner need not wait. Nobody uses the former addresses until these are
    mapped again.
    """

    def __init__(self, unmap: Callable[[int, int], None]) -> None:
        self._unmap = unmap
        self._ranges: dict[int, int] = {}  # num_bytes by address, the oldest first

    @property
    def num_bytes(self) -> int:
        return sum(self._ranges.values())

    def add(self, address: int, num_bytes: int) -> None:
        """Keep a mapping whose pages have no owner any more."""
        self._ranges[address] = num_bytes

    def remove_at(self, address: int, num_bytes: int) -> None:
        """Remove the mappings of a range; parts of these mappings outside the range stay."""
        ranges, self._ranges = self._ranges, {}
        for at, size in ranges.items():
            first, end = max(at, address), min(at + size, address + num_bytes)
            if first >= end:
                self._ranges[at] = size
                continue
            self._unmap(first, end - first)
            if at < first:
                self._ranges[at] = first - at
            if end < at + size:
                self._ranges[end] = at + size - end

    def remove_some(self, num_bytes: int) -> None:
        """Remove the oldest mappings, or parts of these, up to ``num_bytes``."""
        while self._ranges and num_bytes:
            at = next(iter(self._ranges))
            size = self._ranges.pop(at)
            part = min(size, num_bytes)
            self._unmap(at, part)
            num_bytes -= part
            if part < size:
                self._ranges = {at + part: size - part, **self._ranges}

    def remove_all(self) -> None:
        self.remove_some(self.num_bytes)
