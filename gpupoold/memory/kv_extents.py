"""Places of one model's KV extents: read-only queries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice

from gpupoold.memory.address_ranges import AddressRange
from gpupoold.memory.contracts import BlockLedger, Device
from gpupoold.memory.extent_index import OFFLOADED, ExtentIndex, Place
from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.host import HostSlot, Slot
from gpupoold.memory.transfers import Transfer

__all__ = ["OFFLOADED", "Group", "KvExtents", "Place"]

# Extents of a group are moved together: one call maps each row, and one copy moves it. 32 MiB take
# a few milliseconds on an emulated link, and are less than one extent of most models on a GPU.
_GROUP_BYTES = 32 << 20
# Fewest groups of a small KV buffer, so that not all requests wait for one copy.
_MIN_GROUPS = 8


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
        """Start of the KV buffer."""
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

    def place(self, extent: int) -> Place:
        return self.index.place(extent)

    def extents(self, place: Place) -> list[int]:
        """Return the extents at ``place``, lowest first."""
        return self.index.extents(place)

    def first_extents(self, place: Place, count: int) -> list[int]:
        """Return the lowest ``count`` extents at ``place``, or all if fewer."""
        return list(islice(self.index.each(place), count))

    def extents_in_order(self, place: Place, blocks: Iterable[int]) -> list[int]:
        """Return extents at ``place``; extents of ``blocks`` come first, in the given order."""
        size, at = self.geometry.blocks_per_extent, self.index.place
        wanted = dict.fromkeys(block // size for block in blocks)
        first = [extent for extent in wanted if at(extent) is place]
        return first + [extent for extent in self.extents(place) if extent not in wanted]

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
        uses = self.geometry.uses(extents)
        return sum(
            1 for page, count in uses.items() if self.address_range.num_holders(page) == count
        )

    @property
    def num_leaving_pages(self) -> int:
        """Number of pages that become free after the present offloads."""
        if self.geometry.is_aligned:
            return self.index.num_pages(Place.LEAVING)
        return self._known("leaving", lambda: self.num_resident_pages(self.extents(Place.LEAVING)))

    @property
    def num_idle_pages(self) -> int:
        """Number of pages that unmapping all of ``free_extents`` would free."""
        if self.geometry.is_aligned:
            return self.index.num_idle_pages
        return self._known("idle", lambda: self.num_resident_pages(self.free_extents()))

    @property
    def num_returning_pages(self) -> int:
        """Number of pages that restoring all groups on the host would take from the pool."""
        if self.geometry.is_aligned:
            return self.index.num_pages(Place.HOST)
        return self._known("host", lambda: self.num_missing_pages(self.extents(Place.HOST)))

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

    def free_extents(self) -> list[int]:
        """Return extents on the device without a live block, highest first."""
        return self.index.idle()

    def _groups(self, place: Place | None = None) -> list[Group]:
        """Return groups at ``place``, or all, in the order of their transfer's start."""
        among = self._moving if place in (Place.LEAVING, Place.ARRIVING) else self._all_groups
        return [group for group in among if place is None or group.place is place]

    def _put(self, group: Group, place: Place) -> None:
        """Record ``place`` for all extents of a group; update the counters."""
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
        assert self.num_leaving_pages == self.num_resident_pages(self.extents(Place.LEAVING))
        assert self.num_idle_pages == self.num_resident_pages(self.free_extents())
        assert self.num_returning_pages == self.num_missing_pages(self.extents(Place.HOST))

    def _is_dead(self, group: Group) -> bool:
        return len(group.held) == len(self._real_of(group.extents))

    def _real(self, blocks: range) -> range:
        return blocks if blocks.start else blocks[1:]

    def _real_of(self, extents: list[int]) -> list[int]:
        return [b for extent in extents for b in self._real(self.geometry.blocks(extent))]

    def _engine(self) -> BlockLedger:
        assert self._ledger is not None, "attach() has not been called"
        return self._ledger
