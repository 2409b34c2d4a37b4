"""Fixed ranges of addresses with pages mapped into parts of the range."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from gpupoold.memory.contracts import Device, Fence, PageRun
from gpupoold.memory.geometry import as_ranges
from gpupoold.memory.pages import PagePool, split_runs


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
