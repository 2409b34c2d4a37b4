"""Place and block use of each extent of a KV address range, updated on every change.

A model may have thousands of extents, and the turn loop reads the index between two tokens. No
method walks over all extents in Python.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import IntEnum
from itertools import compress

from gpupoold.memory.geometry import KvGeometry


class Place(IntEnum):
    """The place of an extent's bytes."""

    UNMAPPED = 0  # no memory
    DEVICE = 1
    LEAVING = 2  # being copied to the host; still whole on the device
    HOST = 3
    ARRIVING = 4  # being copied to the device; still whole on the host


_PLACES = tuple(Place)  # by value: ten times faster than ``Place(value)``
OFFLOADED = (Place.LEAVING, Place.HOST, Place.ARRIVING)
# For each place a ``bytes.translate`` table: 1 for the place's value, 0 for other values.
_IS_AT = [bytes(code == place for code in range(256)) for place in Place]


class ExtentIndex:
    """Places of all extents, and the number of used blocks in each.

    A block is in use from ``taken`` to ``freed``; the null block is never in use. An extent is
    *idle* while on the device without a used block. ``version`` increases with every change of an
    extent's place or idleness.
    """

    def __init__(self, geometry: KvGeometry) -> None:
        self._geometry = geometry
        self._size = geometry.blocks_per_extent
        self._places = bytearray(geometry.num_extents)
        self._is_idle = bytearray(geometry.num_extents)
        self._num_used = [0] * geometry.num_extents
        self._counts = [geometry.num_extents, 0, 0, 0, 0]  # by place
        self.num_idle = 0
        self.num_used_on_device = 0
        """Number of used blocks in extents on the device."""
        self.version = 0
        self._freed_offloaded: set[int] = set()

    def place(self, extent: int) -> Place:
        return _PLACES[self._places[extent]]

    def put(self, extents: Iterable[int], place: Place) -> None:
        """Record ``place`` as the place of extents."""
        places, counts, used = self._places, self._counts, self._num_used
        for extent in extents:
            before = places[extent]
            if before == place:
                continue
            places[extent] = place
            counts[before] -= 1
            counts[place] += 1
            if before == Place.DEVICE:
                self.num_used_on_device -= used[extent]
                self._note_idle(extent)
            elif place == Place.DEVICE:
                self.num_used_on_device += used[extent]
                self._note_idle(extent)
            if self._freed_offloaded and place not in OFFLOADED:
                self._freed_offloaded.discard(extent)
        self.version += 1

    def taken(self, block_ids: Iterable[int]) -> None:
        """Record free blocks as used."""
        for block in block_ids:
            extent = block // self._size
            self._num_used[extent] += 1
            if self._places[extent] == Place.DEVICE:
                self.num_used_on_device += 1
                if self._num_used[extent] == 1:
                    self._note_idle(extent)

    def freed(self, block_ids: Iterable[int]) -> None:
        """Record blocks as no longer used."""
        for block in block_ids:
            extent = block // self._size
            self._num_used[extent] -= 1
            place = self._places[extent]
            if place == Place.DEVICE:
                self.num_used_on_device -= 1
                if not self._num_used[extent]:
                    self._note_idle(extent)
            elif place != Place.UNMAPPED:
                self._freed_offloaded.add(extent)

    def take_freed_offloaded(self) -> set[int]:
        """Return offloaded extents with blocks freed since the last call."""
        freed, self._freed_offloaded = self._freed_offloaded, set()
        return freed

    def num_used(self, extent: int) -> int:
        """Return the number of used blocks of an extent."""
        return self._num_used[extent]

    def count(self, place: Place) -> int:
        """Return the number of extents at ``place``."""
        return self._counts[place]

    def extents(self, place: Place) -> list[int]:
        """Return all extents at ``place``, lowest first."""
        if not self._counts[place]:
            return []
        is_there = self._places.translate(_IS_AT[place])
        return list(compress(range(len(is_there)), is_there))

    def each(self, place: Place) -> Iterator[int]:
        """Yield extents at ``place`` in ascending order, for callers that need only the first."""
        extent = self._places.find(place)
        while extent >= 0:
            yield extent
            extent = self._places.find(place, extent + 1)

    def idle(self) -> list[int]:
        if not self.num_idle:
            return []
        return list(compress(range(len(self._is_idle)), self._is_idle))[::-1]

    def num_pages(self, place: Place) -> int:
        """Return the number of pages of extents at ``place``, in an aligned geometry."""
        return self._pages_of(self._counts[place], self._places[-1] == place)

    @property
    def num_idle_pages(self) -> int:
        """Number of pages of the idle extents, in an aligned geometry."""
        return self._pages_of(self.num_idle, bool(self._is_idle[-1]))

    def check(self, used: Iterable[int]) -> None:
        """Raise AssertionError unless all counters agree with ``used``, the blocks in use."""
        num_used = [0] * self._geometry.num_extents
        for block in used:
            num_used[block // self._size] += 1
        assert num_used == self._num_used, "blocks in use were miscounted"
        on_device = [extent for extent, at in enumerate(self._places) if at == Place.DEVICE]
        assert self.num_used_on_device == sum(num_used[extent] for extent in on_device)
        idle = [extent for extent in on_device if not num_used[extent]]
        assert self.idle() == idle[::-1]
        assert self.num_idle == len(idle)
        for place in Place:
            there = [extent for extent, at in enumerate(self._places) if at == place]
            assert self.extents(place) == list(self.each(place)) == there
            assert self.count(place) == len(there)
            if self._geometry.is_aligned:
                assert self.num_pages(place) == self._count_pages(there)
        if self._geometry.is_aligned:
            assert self.num_idle_pages == self._count_pages(idle)

    def _note_idle(self, extent: int) -> None:
        is_idle = self._places[extent] == Place.DEVICE and not self._num_used[extent]
        if is_idle != self._is_idle[extent]:
            self._is_idle[extent] = is_idle
            self.num_idle += 1 if is_idle else -1
            self.version += 1

    def _pages_of(self, num_extents: int, has_last: bool) -> int:
        return num_extents * self._geometry.extent_pages - (
            self._geometry.short_pages if has_last else 0
        )

    def _count_pages(self, extents: list[int]) -> int:
        return sum(len(span) for extent in extents for span in self._geometry.pages(extent))
