"""The interface of a device, its physical pages, and ranges of addresses with pages mapped.

A device has physical pages, reserved addresses, copies to and from the host.
"""

from __future__ import annotations

import bisect
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple, Protocol

from gpupoold.memory.libc import memcpy


class OutOfPages(Exception):
    """The pool has too few free pages. A planning error: callers must check before."""


@dataclass(frozen=True, slots=True)
class PageRun:
    """``num_pages`` physically consecutive pages from ``first``."""

    first: int
    num_pages: int

    @property
    def end(self) -> int:
        """One past the last page."""
        return self.first + self.num_pages


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
    numa_node: int = -1
    """NUMA node with the nearest host memory, -1 if all nodes are equal."""
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

    def set_live(self, is_live: bool) -> None:  # noqa: B027
        """Say whether requests are live, which pinning would delay."""

    def unpinned(self) -> Unpinned:
        """Return what host memory is not pinned."""
        return Unpinned()

    def wait_for_driver(self) -> None:  # noqa: B027
        """Wait as a launch of kernels does, for a modelled driver of an emulated device."""

    def release_memory(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Release the memory of unmapped pages to other users of the device until ``reclaim``."""

    def reclaim(self, runs: list[PageRun]) -> None:  # noqa: B027
        """Reclaim runs of ``release_memory``; the other users must have freed the memory."""

    @abstractmethod
    def close(self) -> None:
        """Free all physical memory; every address range must have been released before."""


class PagePool:
    """Allocates physical pages in few, long runs. Pure bookkeeping, no device calls.

    Mapping costs a call per run, so an allocation takes the smallest free run that fits (best fit),
    else the largest runs first. ``num_pages`` is the device's number of pages; for ``table_pages``
    see :attr:`Device.table_pages`.
    """

    def __init__(self, num_pages: int, table_pages: int = 1) -> None:
        self.num_pages = num_pages
        self._table_pages = table_pages
        self._free: list[PageRun] = [PageRun(0, num_pages)] if num_pages else []
        self.num_free = num_pages
        self.version = 0
        """A number that changes with every allocated or freed run."""

    def allocate(self, num_pages: int, at: int = 0) -> list[PageRun]:
        """Allocate ``num_pages``, all or nothing.

        The pages are for mapping from page ``at`` of an address range on: a run with the same
        position in its page tables is preferred, because whole tables can be moved.

        Raises:
            OutOfPages: too few pages are free; nothing was allocated.
        """
        if num_pages > self.num_free:
            raise OutOfPages(
                f"{num_pages} pages requested, {self.num_free} of {self.num_pages} free"
            )
        if num_pages >= self._table_pages > 1 and (alike := self._allocate_alike(num_pages, at)):
            return [alike]
        taken: list[PageRun] = []
        missing = num_pages
        while missing:
            run = self._best_fit(missing) or max(self._free, key=_size)
            taken.append(self._take(run, min(run.num_pages, missing)))
            missing -= taken[-1].num_pages
        return taken

    def allocate_run(self, num_pages: int) -> PageRun | None:
        """Allocate ``num_pages``, at least one, in one run; None if no free run is long enough."""
        run = self._best_fit(num_pages)
        return self._take(run, num_pages) if run else None

    def allocate_at(self, run: PageRun) -> bool:
        """Allocate the pages of ``run``; return False if one is not free or does not exist."""
        index = bisect.bisect_right(self._free, run.first, key=_first) - 1
        if index < 0 or run.end > self._free[index].end:
            return False
        around = self._free[index]
        self._take(around, run.num_pages, run.first - around.first)
        return True

    def num_runs(self, num_pages: int) -> int:
        """Return how many times ``allocate_run`` could allocate ``num_pages`` now."""
        return sum(run.num_pages // num_pages for run in self._free)

    def free(self, runs: list[PageRun]) -> None:
        """Free pages and join adjacent runs.

        Raises:
            ValueError: a page is free already; no page of its run is freed.
        """
        for run in runs:
            self._free_run(run)

    def check_owned(self, pages: list[int]) -> None:
        """Raise AssertionError unless ``pages`` are exactly the pages that are not free."""
        owners = bytearray(self.num_pages)
        for page in pages:
            owners[page] += 1
        for run in self._free:
            owners[run.first : run.end] = bytes(count + 1 for count in owners[run.first : run.end])
        wrong = [page for page, count in enumerate(owners) if count != 1]
        assert not wrong, f"pages with two owners or none: {wrong[:10]}"

    def check_integrity(self) -> None:
        """Raise AssertionError when the free list overlaps, is unsorted or miscounted."""
        end = -1
        for run in self._free:
            assert run.num_pages > 0 and run.first > end, f"bad free run {run}"
            end = run.end  # strictly greater: adjacent runs must have been joined
        assert end <= self.num_pages
        assert sum(run.num_pages for run in self._free) == self.num_free

    def _allocate_alike(self, num_pages: int, at: int) -> PageRun | None:
        """Allocate a run whose first page is ``at`` modulo the pages of a table, or None."""
        skips = ((run, (at - run.first) % self._table_pages) for run in self._free)
        fitting = [(run, skip) for run, skip in skips if run.num_pages - skip >= num_pages]
        if not fitting:
            return None
        run, skip = min(fitting, key=lambda pair: pair[0].num_pages)
        return self._take(run, num_pages, skip)

    def _best_fit(self, num_pages: int) -> PageRun | None:
        fitting = (run for run in self._free if run.num_pages >= num_pages)
        return min(fitting, key=_size, default=None)

    def _take(self, run: PageRun, num_pages: int, skip: int = 0) -> PageRun:
        """Allocate ``num_pages`` of a free run, after ``skip`` pages that stay free."""
        index = bisect.bisect_left(self._free, run.first, key=_first)
        taken = PageRun(run.first + skip, num_pages)
        rest = (PageRun(run.first, skip), PageRun(taken.end, run.end - taken.end))
        self._free[index : index + 1] = [run for run in rest if run.num_pages]
        self.num_free -= num_pages
        self.version += 1
        return taken

    def _free_run(self, run: PageRun) -> None:
        index = bisect.bisect_left(self._free, run.first, key=_first)
        before = self._free[index - 1] if index else None
        after = self._free[index] if index < len(self._free) else None
        overlaps = (before and before.end > run.first) or (after and run.end > after.first)
        if overlaps or run.end > self.num_pages:
            raise ValueError(f"double free of {run}")
        first, end, low, high = run.first, run.end, index, index
        if before and before.end == run.first:
            first, low = before.first, index - 1
        if after and after.first == run.end:
            end, high = after.end, index + 1
        self._free[low:high] = [PageRun(first, end - first)]
        self.num_free += run.num_pages
        self.version += 1


def as_ranges(numbers: Iterable[int]) -> list[range]:
    """Return ``numbers`` in order as ranges, each of which is mapped, or copied, by one call."""
    ranges: list[range] = []
    start = end = -1
    for number in numbers:
        if number != end:
            if start != end:
                ranges.append(range(start, end))
            start = number
        end = number + 1
    if start != end:
        ranges.append(range(start, end))
    return ranges


def split_runs(runs: list[PageRun], num_pages: int) -> tuple[list[PageRun], list[PageRun]]:
    """Return the first ``num_pages`` of ``runs`` and the rest."""
    head: list[PageRun] = []
    for index, run in enumerate(runs):
        if num_pages == 0:
            return head, runs[index:]
        if run.num_pages > num_pages:
            head.append(PageRun(run.first, num_pages))
            rest = PageRun(run.first + num_pages, run.num_pages - num_pages)
            return head, [rest, *runs[index + 1 :]]
        head.append(run)
        num_pages -= run.num_pages
    return head, []


def _first(run: PageRun) -> int:
    return run.first


def _size(run: PageRun) -> int:
    return run.num_pages


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

        Raises:
            OutOfPages: nothing was changed, as after any error of the device.
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
            physical = itertools.chain.from_iterable(range(run.first, run.end) for run in mine)
            self._physical[span.start : span.stop] = physical
            self.num_mapped += len(span)
        if missing == [pages]:  # the usual case
            self._holders[pages.start : pages.stop] = [1] * len(pages)
        else:
            held = self._holders[pages.start : pages.stop]
            self._holders[pages.start : pages.stop] = [count + 1 for count in held]
        return missing

    def drop(self, pages: range) -> None:
        """Release ``pages``; unmap pages without a holder and return them to the pool.

        Raises:
            ValueError: a page has no holder.
        """
        self.drop_each([pages])

    def drop_each(self, ranges: Iterable[range]) -> None:
        """Release several ranges, with one wait of the device for all.

        Raises:
            ValueError: a page has no holder.
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
            return
        mappings = [(self._page_address(span.start), runs) for span, runs in gone]
        self._device.unmap_each(mappings, self.last_use)
        for span, runs in gone:
            self._pool.free(runs)
            self._physical[span.start : span.stop] = [-1] * len(span)
            self.num_mapped -= len(span)

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

    def _page_address(self, page: int) -> int:
        return self.address + page * self._device.page_bytes

    def _spans(self, pages: range, *, mapped: bool) -> list[range]:
        """Return the longest runs of ``pages`` that are mapped (unmapped if not ``mapped``)."""
        if not mapped and not any(self._holders[pages.start : pages.stop]):
            return [pages]  # the usual case: a whole weight address range
        return as_ranges([page for page in pages if bool(self._holders[page]) == mapped])
