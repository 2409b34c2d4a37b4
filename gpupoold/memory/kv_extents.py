"""The extents of a model's KV: byte ranges in any of vLLM's layouts, places, and block use.

All KV tensors of a model are views of one buffer. In a *row*, block ``b`` has ``num_bytes`` bytes
at ``offset + b * stride``: one row per layer when layers are outermost, a single row when blocks
are outermost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain, compress, islice
from operator import attrgetter
from typing import Protocol

from gpupoold.memory.device import AddressRange, Device
from gpupoold.memory.host import HostSlot, Slot
from gpupoold.memory.pages import as_ranges
from gpupoold.memory.transfers import Transfer

# Extents of a group are moved together: one call maps each row, and one copy moves it. 32 MiB take
# a few milliseconds on an emulated link, and are less than one extent of most models on a GPU.
_GROUP_BYTES = 32 << 20
# Fewest groups of a small KV buffer, so that not all requests wait for one copy.
_MIN_GROUPS = 8

_MAX_ALIGNED_BLOCKS_PER_EXTENT = 32


@dataclass(frozen=True, slots=True)
class KvRow:
    """Block ``b`` occupies ``num_bytes`` at ``offset + b * stride``."""

    offset: int
    stride: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """Rows of a KV buffer, cut into extents of consecutive blocks.

    An extent is mapped, moved and unmapped as a whole. An extent has the fewest blocks that fill
    whole pages in every row, so that extents seldom share a page.
    """

    num_blocks: int
    page_bytes: int
    rows: tuple[KvRow, ...]
    blocks_per_extent: int = field(init=False)
    """Blocks in every extent except perhaps the last."""
    is_aligned: bool = field(init=False)
    """True if no two extents or rows share a page, and adjacent extents leave no gap."""
    extent_pages: int = field(init=False)
    """Pages of every extent except perhaps the last, in an aligned geometry."""
    short_pages: int = field(init=False)
    """Number of pages missing from the last extent."""

    def __post_init__(self) -> None:
        # Computed once, because every switch reads these values for every extent.
        object.__setattr__(self, "blocks_per_extent", self._blocks_per_extent())
        object.__setattr__(self, "is_aligned", self._is_aligned())
        first, last = (sum(map(len, self.pages(at))) for at in (0, self.num_extents - 1))
        object.__setattr__(self, "extent_pages", first)
        object.__setattr__(self, "short_pages", first - last)

    @property
    def total_bytes(self) -> int:
        last = self.num_blocks - 1
        return max(row.offset + last * row.stride + row.num_bytes for row in self.rows)

    @property
    def num_pages(self) -> int:
        """Number of pages that cover the buffer."""
        return -(-self.total_bytes // self.page_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all rows."""
        return sum(row.num_bytes for row in self.rows)

    @property
    def extent_bytes(self) -> int:
        """Bytes of the blocks of every extent except perhaps the last."""
        return self.blocks_per_extent * self.block_bytes

    @property
    def num_extents(self) -> int:
        """Number of extents that cover all blocks."""
        return -(-self.num_blocks // self.blocks_per_extent)

    def blocks(self, extent: int) -> range:
        """Return the block ids of an extent."""
        size = self.blocks_per_extent
        return range(extent * size, min((extent + 1) * size, self.num_blocks))

    def pages(self, extent: int) -> list[range]:
        """Return the pages of an extent, one range per row."""
        return self._pages_of(range(extent, extent + 1))

    def _pages_of(self, extents: range) -> list[range]:
        first, last = self.blocks(extents.start).start, self.blocks(extents.stop - 1).stop - 1
        spans = []
        for row in self.rows:
            start = row.offset + first * row.stride
            end = row.offset + last * row.stride + row.num_bytes
            spans.append(range(start // self.page_bytes, -(-end // self.page_bytes)))
        return spans

    def spans(self, extents: list[int]) -> list[range]:
        """Return the page ranges of extents: adjacent ranges joined, shared pages repeated."""
        if self.is_aligned:
            ranges = [span for run in as_ranges(sorted(extents)) for span in self._pages_of(run)]
        else:
            ranges = [span for extent in extents for span in self.pages(extent)]
        spans: list[range] = []
        for span in sorted(ranges, key=attrgetter("start")):
            if spans and spans[-1].stop == span.start:
                spans[-1] = range(spans[-1].start, span.stop)
            else:
                spans.append(span)
        return spans

    def uses(self, extents: list[int]) -> Counter[int]:
        """Return how many rows of ``extents`` lie on each of their pages."""
        return Counter(p for c in extents for span in self.pages(c) for p in span)

    def extents(self, blocks: list[int]) -> list[tuple[int, int]]:
        """Return ``(offset, num_bytes)`` of ascending ``blocks``, row by row; join neighbours."""
        runs = as_ranges(blocks)
        extents: list[tuple[int, int]] = []
        for row in self.rows:
            if row.num_bytes == row.stride:
                extents += [(row.offset + r.start * row.stride, len(r) * row.stride) for r in runs]
            else:
                extents += [(row.offset + block * row.stride, row.num_bytes) for block in blocks]
        return extents

    def gaps(self, pages: list[range], blocks: list[int]) -> list[tuple[int, int]]:
        """Return ``(offset, num_bytes)`` of the bytes on ``pages`` outside of ``blocks``."""
        covered = sorted(self.extents(blocks))
        gaps: list[tuple[int, int]] = []
        first = 0  # the first extent that may reach into this span
        for span in sorted(pages, key=attrgetter("start")):
            at, end = span.start * self.page_bytes, span.stop * self.page_bytes
            for index in range(first, len(covered)):
                offset, num_bytes = covered[index]
                if offset >= end:
                    break
                if at < offset:
                    gaps.append((at, offset - at))
                at = max(at, offset + num_bytes)
                first = index
            if at < end:
                gaps.append((at, end - at))
        return gaps

    def _is_aligned(self) -> bool:
        lengths = ((row, self.blocks_per_extent * row.stride) for row in self.rows)
        return all(
            row.num_bytes == row.stride
            and row.offset % self.page_bytes == length % self.page_bytes == 0
            for row, length in lengths
        )

    def _blocks_per_extent(self) -> int:
        aligned = _num_aligned(self.page_bytes, [row.stride for row in self.rows])
        if aligned is not None:
            return aligned
        return max(-(-self.page_bytes // row.stride) for row in self.rows)


def in_whole_extents(kv_bytes: int, page_bytes: int, strides: Collection[int]) -> int:
    """Return ``kv_bytes``, or a little less, so that no two rows of blocks share a page.

    ``strides`` has the bytes of a block in each row. Adjacent extents are then mapped by one call
    per row. Returns ``kv_bytes`` unchanged if too many blocks would be needed to fill whole pages.
    """
    aligned = _num_aligned(page_bytes, strides)
    if not strides or aligned is None:
        return kv_bytes
    return kv_bytes - kv_bytes % (aligned * sum(strides))


def _num_aligned(page_bytes: int, strides: Collection[int]) -> int | None:
    """Return the fewest blocks that fill whole pages in every row, None if too many.

    Any number is accepted if the blocks take one page of each row, the least possible.
    """
    aligned = math.lcm(*(page_bytes // math.gcd(stride, page_bytes) for stride in strides))
    is_one_page = aligned * max(strides, default=0) <= page_bytes
    return aligned if is_one_page or aligned <= _MAX_ALIGNED_BLOCKS_PER_EXTENT else None


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
    extent's place or idleness. The turn loop reads the index between two tokens, so no method walks
    over thousands of extents in Python.
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
        """Return all idle extents, highest first."""
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
            assert self._counts[place] == len(there)
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
        pages = num_extents * self._geometry.extent_pages
        return pages - self._geometry.short_pages if has_last else pages

    def _count_pages(self, extents: list[int]) -> int:
        return sum(len(span) for extent in extents for span in self._geometry.pages(extent))


class BlockLedger(Protocol):
    """The engine's account of its blocks; never lists block 0, the engine's null block."""

    def watch(self, watcher: ExtentIndex) -> None:
        """Report every later change to ``watcher``; all blocks must be free."""

    def hold(self, block_ids: Sequence[int]) -> None:
        """Remove free blocks from the engine's free list; drop their cached prefixes."""

    def keep(self, block_ids: Sequence[int]) -> None:
        """Add a reference to a request's blocks, so that the blocks outlive the request."""

    def give(self, block_ids: Sequence[int]) -> None:
        """Drop the reference of ``hold`` or ``keep``; blocks without another become free."""

    def live(self, block_ids: Iterable[int]) -> list[int]:
        """Return the blocks in use by a request or a hold."""

    @property
    def num_free(self) -> int:
        """Number of blocks that the engine could allocate now."""


@dataclass(eq=False, slots=True)
class Group:
    """Extents that were offloaded together, until they are restored.

    ``blocks`` were live when the group was offloaded; ``slot`` has their bytes row by row, so that
    adjacent blocks are copied in one piece. ``held`` are the blocks withheld from the engine until
    the group is restored.
    """

    extents: list[int]
    slot: Slot
    blocks: list[int]
    held: set[int] = field(default_factory=set)
    transfer: Transfer | None = None
    place: Place = Place.DEVICE
    """The place of all extents of the group."""


class KvExtents:
    """The extents of a KV address range, and the engine's account of their blocks."""

    def __init__(self, geometry: KvGeometry, address_range: AddressRange, device: Device) -> None:
        self.geometry = geometry
        self.address_range = address_range
        self._device = device
        self.index = ExtentIndex(geometry)
        self._offloaded: dict[int, Group] = {}  # by extent
        self._all_groups: dict[Group, None] = {}  # in the order of their offload
        self._moving: dict[Group, None] = {}  # groups in transfer, in order of start
        self.host_bytes = 0
        """Host bytes of the offloaded extents."""
        self.missing_bytes = 0
        """Bytes neither on the device nor being copied to the device."""
        self._pages_known: dict[str, tuple[int, int]] = {}  # index version and number
        self._ledger: BlockLedger | None = None

    @property
    def address(self) -> int:
        return self.address_range.address

    @property
    def resident_bytes(self) -> int:
        """Bytes of device memory mapped into this address range."""
        return self.address_range.num_mapped * self._device.page_bytes

    @property
    def peer_host_bytes(self) -> int:
        """Bytes of ``host_bytes`` that are in other workers' host memory."""
        slots = (group.slot for group in self._groups())
        return sum(slot.num_bytes for slot in slots if not isinstance(slot, HostSlot))

    @property
    def is_whole(self) -> bool:
        """True if no extent is offloaded, so that every request can run."""
        return not self._offloaded

    def is_on_device(self, blocks: Iterable[int]) -> bool:
        """Return whether the bytes of all these blocks are on the device."""
        size, offloaded = self.geometry.blocks_per_extent, self._offloaded
        return not offloaded or not any(block // size in offloaded for block in blocks)

    def first_extents(self, place: Place, count: int) -> list[int]:
        return list(islice(self.index.each(place), count))

    def extents_in_order(self, place: Place, blocks: Iterable[int]) -> list[int]:
        """Return extents at ``place``; extents of ``blocks`` come first, in the given order."""
        size, at = self.geometry.blocks_per_extent, self.index.place
        wanted = dict.fromkeys(block // size for block in blocks)
        first = [extent for extent in wanted if at(extent) is place]
        return first + [extent for extent in self.index.extents(place) if extent not in wanted]

    def cut(self, extents: list[int]) -> Iterator[list[int]]:
        """Yield ``extents`` in order, in lists that are best offloaded together."""
        group_bytes = min(_GROUP_BYTES, self.geometry.total_bytes // _MIN_GROUPS)
        most = max(1, group_bytes // self.geometry.extent_bytes)
        num_groups = -(-len(extents) // most)
        num_groups += num_groups % 2  # an even number keeps two copying threads busy
        size = max(1, -(-len(extents) // max(1, num_groups)))
        return (extents[at : at + size] for at in range(0, len(extents), size))

    def groups_on_host(self, blocks: Iterable[int]) -> Iterator[list[int]]:
        """Yield the extents of each group on the host, beginning with the groups of ``blocks``.

        Groups are searched lazily, for callers that need only the first.
        """
        size, seen = self.geometry.blocks_per_extent, set[Group]()
        wanted = (self._offloaded.get(block // size) for block in blocks)
        for group in chain(wanted, self._groups(Place.HOST) if self.missing_bytes else ()):
            if group is not None and group.place is Place.HOST and group not in seen:
                seen.add(group)
                yield group.extents

    def whereabouts(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield ``(address, num_bytes)`` of the bytes of blocks, row by row in their order.

        The bytes are in the address range, or in host memory if offloaded. No block may be in
        transfer.
        """
        on_host: dict[int, tuple[int, int]] = {}
        size = self.geometry.blocks_per_extent
        offloaded = (self._offloaded.get(block // size) for block in blocks)
        for group in dict.fromkeys(group for group in offloaded if group is not None):
            places = self._extents(group.blocks)
            on_host |= {at: (host, n) for at, host, n in group.slot.beside(places)}
        for address, num_bytes in self._extents(blocks):
            while num_bytes:
                here, length = on_host.get(address, (address, num_bytes))
                yield here, length
                address, num_bytes = address + length, num_bytes - length

    def _extents(self, blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
        for row in self.geometry.rows:
            for block in blocks:
                yield self.address + row.offset + block * row.stride, row.num_bytes

    def num_missing_pages(self, extents: list[int]) -> int:
        """Return the number of pages that mapping ``extents`` would take from the pool."""
        if self.geometry.is_aligned:
            return sum(map(self.address_range.num_missing, self.geometry.spans(extents)))
        pages = self.geometry.uses(extents)
        return sum(1 for page in pages if not self.address_range.num_holders(page))

    def num_resident_pages(self, extents: list[int]) -> int:
        """Return the number of pages of ``extents`` that other extents do not share."""
        if self.geometry.is_aligned:
            return sum(map(len, self.geometry.spans(extents)))
        uses, holders = self.geometry.uses(extents), self.address_range.num_holders
        return sum(holders(page) == count for page, count in uses.items())

    @property
    def num_leaving_pages(self) -> int:
        """Number of pages that become free after the present offloads."""
        if self.geometry.is_aligned:
            return self.index.num_pages(Place.LEAVING)
        return self._known(
            "leaving", lambda: self.num_resident_pages(self.index.extents(Place.LEAVING))
        )

    @property
    def num_idle_pages(self) -> int:
        """Number of pages that unmapping all idle extents would free."""
        if self.geometry.is_aligned:
            return self.index.num_idle_pages
        return self._known("idle", lambda: self.num_resident_pages(self.index.idle()))

    @property
    def num_returning_pages(self) -> int:
        """Number of pages that restoring all groups on the host would take from the pool."""
        if self.geometry.is_aligned:
            return self.index.num_pages(Place.HOST)
        return self._known("host", lambda: self.num_missing_pages(self.index.extents(Place.HOST)))

    def _known(self, name: str, count: Callable[[], int]) -> int:
        """Return the cached result of ``count``, recomputed only after a change."""
        version, answer = self._pages_known.get(name, (-1, 0))
        if version != self.index.version:
            version, answer = self.index.version, count()
            self._pages_known[name] = version, answer
        return answer

    def live_blocks(self, extent: int) -> list[int]:
        """Return an extent's blocks in use by requests."""
        group = self._offloaded.get(extent)
        blocks = self._engine().live(self._real(self.geometry.blocks(extent)))
        return [b for b in blocks if b not in group.held] if group else blocks

    def _groups(self, place: Place | None = None) -> list[Group]:
        """Return groups at ``place``, or all, in the order of their transfer's start."""
        among = self._moving if place in (Place.LEAVING, Place.ARRIVING) else self._all_groups
        return [group for group in among if place is None or group.place is place]

    def _put(self, group: Group, place: Place) -> None:
        size = group.slot.num_bytes
        if group.place is Place.HOST:
            self.missing_bytes -= size
        if place is Place.HOST:
            self.missing_bytes += size
        if place in OFFLOADED and group not in self._all_groups:
            self._all_groups[group] = None
            self._offloaded |= dict.fromkeys(group.extents, group)
            self.host_bytes += size
        elif place not in OFFLOADED:
            del self._all_groups[group]
            self.host_bytes -= size
            for extent in group.extents:
                del self._offloaded[extent]
        self._moving.pop(group, None)
        if place in (Place.LEAVING, Place.ARRIVING):
            self._moving[group] = None
        group.place = place
        self.index.put(group.extents, place)

    def _check_counters(self) -> None:
        """Raise AssertionError if the incremental counters differ from a scan."""
        groups = list(dict.fromkeys(self._offloaded.values()))
        assert set(groups) == set(self._all_groups)
        on_host = [group for group in groups if group.place is Place.HOST]
        assert set(self._moving) == set(groups) - set(on_host)
        assert self.host_bytes == sum(group.slot.num_bytes for group in groups)
        assert self.missing_bytes == sum(group.slot.num_bytes for group in on_host)
        assert self.num_leaving_pages == self.num_resident_pages(self.index.extents(Place.LEAVING))
        assert self.num_idle_pages == self.num_resident_pages(self.index.idle())
        assert self.num_returning_pages == self.num_missing_pages(self.index.extents(Place.HOST))

    def _is_dead(self, group: Group) -> bool:
        return len(group.held) == len(self._real_of(group.extents))

    def _real(self, blocks: range) -> range:
        return blocks if blocks.start else blocks[1:]

    def _real_of(self, extents: list[int]) -> list[int]:
        return [b for extent in extents for b in self._real(self.geometry.blocks(extent))]

    def _engine(self) -> BlockLedger:
        assert self._ledger is not None, "attach() has not been called"
        return self._ledger
