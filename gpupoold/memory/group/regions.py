"""Regions: ranges of addresses that all ranks of a group have, each at another address.

The leader translates its addresses into regions and offsets, each follower translates these into
its own addresses.
"""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from gpupoold.memory.contracts import PageRun


class RegionPlace(NamedTuple):
    """An offset in bytes in a region."""

    region: int
    offset: int


PlacedMapping = tuple[RegionPlace, list[PageRun]]
"""The place from which runs are mapped one after the other."""


class LeaderRegions:
    """The regions by the leader's addresses, for all threads.

    Readers see a consistent list without a lock, because a change replaces the list.
    """

    def __init__(self) -> None:
        self._changing = threading.Lock()
        self._numbers = itertools.count(1)
        self._sorted: list[tuple[int, int, int]] = []  # address, bytes, number

    def new_number(self) -> int:
        """Return a number for a region that all ranks will register."""
        return next(self._numbers)

    def add(self, number: int, address: int, num_bytes: int) -> None:
        """Register a region, which every follower has registered."""
        with self._changing:
            self._sorted = sorted([*self._sorted, (address, num_bytes, number)])

    def pop(self, address: int) -> int | None:
        """Forget the region that begins at ``address``; return its number, None if unknown."""
        with self._changing:
            found = [entry for entry in self._sorted if entry[0] == address]
            if found:
                self._sorted = [entry for entry in self._sorted if entry[0] != address]
        return found[0][2] if found else None

    def place(self, address: int) -> RegionPlace | None:
        """Return the place of an address, None outside of all regions."""
        entries = self._sorted
        index = bisect_right(entries, (address, 1 << 64, 0)) - 1
        if index < 0:
            return None
        start, num_bytes, number = entries[index]
        return RegionPlace(number, address - start) if address - start < num_bytes else None


class _Region(NamedTuple):
    address: int
    close: Callable[[], None]


class FollowerRegions:
    """A follower's addresses of the regions."""

    def __init__(self) -> None:
        self._regions: dict[int, _Region] = {}

    def add(self, number: int, address: int, close: Callable[[], None]) -> None:
        """Register a region; ``close`` frees the follower's range or buffer."""
        self._regions[number] = _Region(address, close)

    def address(self, place: RegionPlace) -> int:
        """Return the follower's address of a place."""
        return self._regions[place.region].address + place.offset

    def close_region(self, number: int) -> None:
        """Free a region, unless another thread has done so or the region is unknown."""
        region = self._regions.pop(number, None)
        if region is not None:
            region.close()
