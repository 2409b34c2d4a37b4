"""Physical pages of a device or of host memory: runs of pages, and the pool that assigns pages."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple


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


class WeightsId(NamedTuple):
    """The weights of a model, with the numbers of the snapshot's memfd."""

    model: str
    file_id: tuple[int, int]


@dataclass(slots=True)
class _Unbound:
    """Free pages with the contents of consecutive pages of an owner, from its page ``first`` on."""

    runs: list[PageRun]
    first: int = 0


class PagePool:
    """Allocates physical pages in few, long runs. Pure bookkeeping, no device calls.

    Mapping costs a call per run, so an allocation takes the smallest free run that fits (best fit),
    else the largest runs first. ``num_pages`` is the device's number of pages; for ``table_pages``
    see :attr:`Device.table_pages`.

    Free pages may be *unbound*: their contents stay, for the former owner, until the pages are
    allocated. Pages without contents are allocated first, then the pages whose owner has been
    unbound for the longest time, from its last page on.
    """

    def __init__(self, num_pages: int, table_pages: int = 1) -> None:
        self.num_pages = num_pages
        self._table_pages = table_pages
        self._free: list[PageRun] = [PageRun(0, num_pages)] if num_pages else []
        self.num_free = num_pages
        """Number of free pages, with those that are unbound."""
        self._unbound: dict[WeightsId, _Unbound] = {}
        self._num_unbound = 0
        self.version = 0
        """A number that changes with every allocated or freed run."""

    def allocate(self, num_pages: int, at: int = 0) -> list[PageRun]:
        """Allocate ``num_pages``, all or nothing.

        The pages are for mapping from page ``at`` of an address range on: a run with the same
        position in its page tables is preferred, because whole tables can be moved.

        Raises OutOfPages: too few pages are free; nothing was allocated.
        """
        if num_pages > self.num_free:
            raise OutOfPages(
                f"{num_pages} pages requested, {self.num_free} of {self.num_pages} free"
            )
        self._give_up(num_pages)
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

        Raises ValueError: a page is free already; no page of its run is freed.
        """
        for run in runs:
            self._free_run(run)

    def unbind(self, owner: WeightsId, runs: list[PageRun]) -> None:
        """Free an owner's pages from the first on; their contents stay until they are allocated."""
        self.forget(owner)
        if runs:
            self._unbound[owner] = _Unbound(runs)
            self._count_unbound(_num_pages(runs))

    def bind(self, owner: WeightsId, first: int, num_pages: int) -> list[PageRun]:
        """Allocate up to ``num_pages`` with an owner's contents, which begin with page ``first``.

        If contents of that page are not left, further contents of the owner are given up.
        """
        unbound = self._unbound.get(owner)
        if unbound is None or unbound.first != first:
            self.forget(owner)
            return []
        runs, unbound.runs = split_runs(unbound.runs, num_pages)
        unbound.first += _num_pages(runs)
        self._count_unbound(-_num_pages(runs))
        if not unbound.runs:
            del self._unbound[owner]
        return runs

    def forget(self, owner: WeightsId) -> None:
        """Give up all contents of an owner."""
        if (unbound := self._unbound.pop(owner, None)) is not None:
            self._drop(unbound.runs)

    def num_unbound(self) -> dict[WeightsId, int]:
        """Return the number of unbound pages by owner."""
        return {owner: _num_pages(unbound.runs) for owner, unbound in self._unbound.items()}

    def check_owned(self, pages: list[int]) -> None:
        """Raise AssertionError unless ``pages`` are exactly the pages that are not free."""
        owners = bytearray(self.num_pages)
        for page in pages:
            owners[page] += 1
        for run in self._all_free():
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
        end = 0
        for run in sorted(self._all_free(), key=_first):
            assert run.first >= end, f"{run} is free twice"
            end = run.end
        assert self._num_unbound == sum(self.num_unbound().values())
        assert _num_pages(self._free) + self._num_unbound == self.num_free

    def _all_free(self) -> list[PageRun]:
        unbound = [run for one in self._unbound.values() for run in one.runs]
        return [*self._free, *unbound]

    def _count_unbound(self, num_pages: int) -> None:
        self._num_unbound += num_pages
        self.num_free += num_pages
        self.version += 1

    def _drop(self, runs: list[PageRun]) -> None:
        self._count_unbound(-_num_pages(runs))
        self.free(runs)

    def _give_up(self, num_pages: int) -> None:
        while (short := num_pages + self._num_unbound - self.num_free) > 0:
            owner, unbound = next(iter(self._unbound.items()))
            unbound.runs, gone = split_runs(unbound.runs, max(0, _num_pages(unbound.runs) - short))
            self._drop(gone)
            if not unbound.runs:
                del self._unbound[owner]

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


def _num_pages(runs: Iterable[PageRun]) -> int:
    return sum(run.num_pages for run in runs)


def _first(run: PageRun) -> int:
    return run.first


def _size(run: PageRun) -> int:
    return run.num_pages
