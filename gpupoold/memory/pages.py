"""Physical pages, and the fixed ranges of addresses into which pages are mapped."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable

from gpupoold.memory.contracts import Device, Fence, OutOfPages, PageRun


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
        self._free[index : index + 1] = [one for one in rest if one.num_pages]
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
