"""The interface of a device, and ranges of addresses with its physical pages mapped.

A device has physical pages, reserved addresses, copies to and from the host.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from gpupoold.errors import Failed
from gpupoold.memory.libc import NO_NODE, memcpy
from gpupoold.memory.pages import PagePool, PageRun, WeightsId, as_ranges, split_runs


@dataclass(slots=True)
class FillTime:
    """Thread-seconds in ``map_and_fill`` so far, by activity."""

    map_s: float = 0.0
    copy_s: float = 0.0

    def map_share_since(self, before: FillTime) -> float:
        """Return the share of mapping in the time since ``before``; 0 if no time was spent."""
        mapped, copied = self.map_s - before.map_s, self.copy_s - before.copy_s
        return mapped / (mapped + copied) if mapped + copied > 0 else 0.0


class Copy(NamedTuple):
    """A copy of ``num_bytes`` from ``source`` to ``target``, one of which is a host address."""

    target: int
    source: int
    num_bytes: int


class Unpinned(NamedTuple):
    """Host bytes that are not pinned, or not yet, and the driver's refusal, if any."""

    num_bytes: int = 0
    problem: str = ""


def cut(copies: Sequence[Copy], batch_bytes: int) -> Iterator[list[Copy]]:
    """Yield ``copies`` in order, cut into lists of ``batch_bytes``; the last may be shorter."""
    batch: list[Copy] = []
    left = batch_bytes
    for target, source, num_bytes in copies:
        done = 0
        while done < num_bytes:
            length = min(num_bytes - done, left)
            batch.append(Copy(target + done, source + done, length))
            done += length
            left -= length
            if not left:
                yield batch
                batch, left = [], batch_bytes
    if batch:
        yield batch


class Direction(Enum):
    """The direction of a copy stream."""

    IN = auto()
    OUT = auto()


class CopyStream(Protocol):
    """Copies in one direction that overlap the engines' kernels; for use by one thread.

    Until a copy has finished, its pages must stay mapped, its host memory pinned, and no kernel may
    use its bytes. Kernels launched before ``fence`` finish before any copy that starts ``after``
    the fence. If a device has several copy streams per direction, a fence of any applies to all.
    """

    def fence(self) -> int:
        """Return a fence after all kernels launched so far; called by the turn loop's thread."""

    def begin(self, copies: Sequence[Copy], after: int) -> int:
        """Start ``copies`` as one batch, in any order; return its number for ``wait``.

        May return before the copies have finished.
        """

    def wait(self, batch: int) -> None:
        """Return when a batch and all earlier ones have finished."""

    def close(self) -> None:
        """Close the copy stream, on which no copy may start any more; callable by any thread."""


class Fence:
    """A moment of the engines' work: the kernels launched before ``record``.

    This class is the fence of a device whose kernels are synchronous: no method has work to do.
    """

    def record(self) -> None:
        """Take the present moment instead of the former one."""

    def wait(self) -> None:
        """Return when the kernels of the moment have finished; at once without a moment."""

    def close(self) -> None:
        """Free the fence's resources."""


class Device(ABC):
    """One device's memory.

    The worker's turn loop makes all calls, except those of copy streams and of ``DeviceThread``.

    Physical pages ``0 .. num_pages - 1`` exist from construction to ``close``; the page pool
    assigns the pages to owners. Addresses are plain integers, valid for tensors while pages are
    mapped.
    """

    page_bytes: int
    num_pages: int
    is_host_addressable: bool
    has_link: bool = True
    """False if the host's cores make the copies, which then delay steps instead of overlapping."""
    table_pages: int = 1
    """Pages per page table, where moving a whole table makes mapping cheaper."""
    piece_bytes: int = 16 << 20
    """Bytes that ``map_and_fill`` copies while it maps the next piece, if the backend can."""
    load_slack_bytes: int = 0
    """Memory that vLLM needs beyond a model's weights while it loads the model."""
    copy_batch_bytes: int = 8 << 20
    """Bytes that a copy stream copies at a time, enough to keep the link busy."""
    rank_nodes: Sequence[int] = (NO_NODE,)
    """NUMA node with the nearest host memory of each rank, ``NO_NODE`` if all nodes are equal."""
    pci_bus_id: str = ""
    """PCI address of the GPU, of the first GPU of a group; empty on an emulated device."""
    num_ranks: int = 1
    """Number of GPUs that hold each model together. Pages and bytes are those of one rank."""

    def __init__(self) -> None:
        self.spent = FillTime()

    def share_host(self, address: int, num_bytes: int, fd: int) -> None:  # noqa: B027
        """Let the other ranks map and pin their parts of the memory behind ``fd``.

        Part ``r`` begins at ``r * num_bytes``; the caller has mapped and pinned part 0.
        """

    @abstractmethod
    def reserve(self, num_pages: int) -> int:
        """Reserve addresses for ``num_pages``; access before ``map`` is an error."""

    @abstractmethod
    def release(self, address: int, num_pages: int) -> None:
        """Release reserved addresses without mappings."""

    @abstractmethod
    def map(self, address: int, runs: list[PageRun]) -> None:
        """Map the runs one after the other from ``address``; contents are undefined.

        After an exception nothing is mapped.
        """

    def unmap(self, address: int, runs: list[PageRun]) -> None:
        """Undo a ``map`` of the same runs at ``address``; the range stays reserved."""
        self.unmap_each([(address, runs)])

    @abstractmethod
    def unmap_each(
        self, mappings: Sequence[tuple[int, list[PageRun]]], last_use: Fence | None = None
    ) -> None:
        """Unmap several mappings; backends wait only once for users of the pages.

        No kernel launched after ``last_use`` uses the pages; None means that any kernel may.
        """

    def open_fence(self) -> Fence:
        """Return a fence without a moment."""
        return Fence()

    @abstractmethod
    def map_and_fill(self, address: int, runs: list[PageRun], source: int | None) -> None:
        """Map, then copy the same number of bytes from host address ``source`` (None: zeros).

        After an exception nothing is mapped. Backends overlap mapping and copying where possible.
        """

    @abstractmethod
    def zero(self, address: int, num_bytes: int) -> None:
        """Set mapped bytes to zero before any kernel launched later."""

    @abstractmethod
    def copy_in(self, address: int, source: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` from host address ``source`` to the device's ``address``."""

    @abstractmethod
    def copy_out(self, target: int, address: int, num_bytes: int) -> None:
        """Copy ``num_bytes`` from the device's ``address`` to host address ``target``."""

    def copy_in_host(self, target: int, source: int, num_bytes: int) -> None:
        """Copy from host address to host address, in the calling thread."""
        memcpy(target, source, num_bytes)

    @abstractmethod
    def open_copy_stream(self, direction: Direction) -> CopyStream:
        """Open a copy stream, independent of the calls above and of the engines' kernels."""

    def open_copy_streams(self, direction: Direction) -> list[CopyStream]:
        """Open as many copy streams as fill the link."""
        return [self.open_copy_stream(direction)]

    def free_bytes(self) -> int | None:
        """Return the free bytes of device memory outside of the pages; None without such memory."""
        return None

    def synchronize(self) -> None:  # noqa: B027
        """Return when all copies started earlier have finished."""

    def wait_for_ranks(self) -> None:  # noqa: B027
        """Return when all ranks have made the copies and mappings of the calls above."""

    def pin(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Pin host memory for full-speed copies, as far as the driver permits.

        Slow on a GPU (0.1 s per GB), so never called in a switch.
        """

    def pin_later(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Pin host memory in idle moments; return at once. Copies are slower until then."""

    def unpin(self, address: int, num_bytes: int) -> None:  # noqa: B027
        """Undo a ``pin`` or ``pin_later`` of the same range, before the range is unmapped."""

    def unpin_later(self, address: int, num_bytes: int, then: Callable[[], None]) -> None:
        """Let a thread ``unpin`` a range, and then call ``then``, which may unmap the range."""
        self.unpin(address, num_bytes)
        then()

    def stage_far_memory(self) -> None:  # noqa: B027
        """Copy memory of other NUMA nodes through buffers from now on, instead of pinning it."""

    def set_live(self, is_live: bool) -> None:  # noqa: B027
        """Say whether requests are live, which pinning would delay."""

    def unpinned(self) -> Unpinned:
        """Return what host memory is not pinned."""
        return Unpinned()

    def watch_unpinned(self, on_change: Callable[[], None]) -> None:  # noqa: B027
        """Let any thread call ``on_change`` when ``unpinned`` has changed."""

    def wait_for_driver(self) -> None:  # noqa: B027
        """Wait as a launch of kernels does, for a modelled driver of an emulated device."""

    def release_memory(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Release the memory of unmapped pages to other users of the device until ``reclaim``."""

    def reclaim(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Reclaim runs of ``release_memory``; the other users must have freed the memory."""

    @abstractmethod
    def close(self) -> None:
        """Free all physical memory; every address range must have been released before."""


def most_addressable(device: Device, num_pages: int) -> int:
    """Return for how many pages addresses can be reserved now, at most ``num_pages``.

    The driver of WSL cannot reserve 32 GiB on some machines (node-llama-cpp#580). Raises Failed if
    not even the addresses of a page can be reserved.
    """
    while True:
        try:
            device.release(device.reserve(num_pages), num_pages)
        except Failed:
            if num_pages <= 1:
                raise
            num_pages //= 2
        else:
            return num_pages


class AddressRange:
    """``num_pages`` reserved addresses on a device, mapped page by page from the pool.

    A page is mapped while at least one holder retains the page, so byte ranges that share a page
    can be retained and released independently.
    """

    def __init__(self, device: Device, pool: PagePool, num_pages: int) -> None:
        self._device = device
        self._pool = pool
        self.num_pages = num_pages
        self.address = device.reserve(num_pages)
        self._holders = [0] * num_pages
        self._physical = [-1] * num_pages
        self.num_mapped = 0
        """Number of pool pages mapped into this address range."""
        self.last_use: Fence | None = None
        """The owner's last kernels, None while the owner may launch more."""

    @property
    def physical_pages(self) -> list[int]:
        """Indices of the pool pages mapped into this address range."""
        return [page for page in self._physical if page >= 0]

    def num_missing(self, pages: range) -> int:
        """Return how many of ``pages`` are not mapped."""
        return self._holders[pages.start : pages.stop].count(0)

    def num_holders(self, page: int) -> int:
        """Return the number of holders of ``page``."""
        return self._holders[page]

    def retain(
        self, pages: range, source: int | None = None, *, is_filled: bool = True
    ) -> list[range]:
        """Retain ``pages``; map the unmapped pages among them and return these as ranges.

        New pages are filled from the host bytes at ``source`` (which covers all of ``pages``) or
        with zeros, so that no bytes of another model are visible. If ``is_filled`` is false, the
        caller fills the new pages before any reader.

        Raises OutOfPages: nothing was changed, as after any error of the device.
        """
        missing = self._spans(pages, mapped=False)
        first = missing[0].start if missing else 0
        runs = self._pool.allocate(sum(len(span) for span in missing), first)
        mapped: list[tuple[range, list[PageRun]]] = []
        left = runs
        try:
            for span in missing:
                mine, left = split_runs(left, len(span))
                skip = (span.start - pages.start) * self._device.page_bytes
                address = self._page_address(span.start)
                if is_filled:
                    at = None if source is None else source + skip
                    self._device.map_and_fill(address, mine, at)
                else:
                    self._device.map(address, mine)
                mapped.append((span, mine))
        except BaseException:
            for span, mine in mapped:
                self._device.unmap(self._page_address(span.start), mine)
            self._pool.free(runs)
            raise
        for span, mine in mapped:
            self._mapped(span, mine)
        if missing == [pages]:  # the usual case
            self._holders[pages.start : pages.stop] = [1] * len(pages)
        else:
            held = self._holders[pages.start : pages.stop]
            self._holders[pages.start : pages.stop] = [count + 1 for count in held]
        return missing

    def bind(self, owner: WeightsId, first: int, num_pages: int) -> int:
        """Map up to ``num_pages`` from page ``first`` on that ``unbind`` has left; return how many.

        Raises Exception: the device cannot map; the contents are given up.
        """
        runs = self._pool.bind(owner, first, num_pages)
        if not runs:
            return 0
        pages = range(first, first + sum(run.num_pages for run in runs))
        try:
            self._device.map(self._page_address(first), runs)
        except BaseException:
            self._pool.free(runs)
            raise
        self._mapped(pages, runs)
        self._holders[first : pages.stop] = [1] * len(pages)
        return len(pages)

    def unbind(self, owner: WeightsId, pages: range) -> None:
        """Release ``pages`` as ``drop`` does; the pool keeps their contents for ``bind``."""
        self._pool.unbind(owner, self._unmap([pages]))

    def drop(self, pages: range) -> None:
        """Release ``pages``; unmap pages without a holder and return them to the pool.

        Raises ValueError: a page has no holder.
        """
        self.drop_each([pages])

    def drop_each(self, ranges: Iterable[range]) -> None:
        """Release several ranges, with one wait of the device for all.

        Raises ValueError: a page has no holder.
        """
        self._pool.free(self._unmap(ranges))

    def _unmap(self, ranges: Iterable[range]) -> list[PageRun]:
        """Release several ranges; return the pages without a holder, which are unmapped.

        Raises ValueError: a page has no holder.
        """
        gone: list[tuple[range, list[PageRun]]] = []
        for pages in ranges:
            held = self._holders[pages.start : pages.stop]
            if not all(held):
                raise ValueError(f"pages {pages} of the address range are not all held")
            is_last = max(held, default=0) == 1
            fewer = [0] * len(pages) if is_last else [count - 1 for count in held]
            self._holders[pages.start : pages.stop] = fewer
            for span in self._spans(pages, mapped=False):
                physical = as_ranges(self._physical[span.start : span.stop])
                gone.append((span, [PageRun(run.start, len(run)) for run in physical]))
        if not gone:
            return []
        mappings = [(self._page_address(span.start), runs) for span, runs in gone]
        self._device.unmap_each(mappings, self.last_use)
        for span, _ in gone:
            self._physical[span.start : span.stop] = [-1] * len(span)
            self.num_mapped -= len(span)
        return [run for _, runs in gone for run in runs]

    def close(self) -> None:
        """Unmap all pages and release the addresses."""
        self.last_use = None
        mapped = [page for page in range(self.num_pages) if self._physical[page] >= 0]
        for page in mapped:
            self._holders[page] = 1
        for span in as_ranges(mapped):
            self.drop(span)
        self._device.release(self.address, self.num_pages)

    def check_integrity(self) -> None:
        """Raise AssertionError when holders, page table and counter disagree."""
        mapped = [page >= 0 for page in self._physical]
        assert mapped == [count > 0 for count in self._holders]
        assert sum(mapped) == self.num_mapped

    def _mapped(self, span: range, runs: list[PageRun]) -> None:
        physical = itertools.chain.from_iterable(range(run.first, run.end) for run in runs)
        self._physical[span.start : span.stop] = physical
        self.num_mapped += len(span)

    def _page_address(self, page: int) -> int:
        return self.address + page * self._device.page_bytes

    def _spans(self, pages: range, *, mapped: bool) -> list[range]:
        """Return the longest runs of ``pages`` that are mapped (unmapped if not ``mapped``)."""
        if not mapped and not any(self._holders[pages.start : pages.stop]):
            return [pages]  # the usual case: a whole weight address range
        return as_ranges([page for page in pages if bool(self._holders[page]) == mapped])
