"""KV of ended requests in host memory, by vLLM's hashes of blocks.

The copies fill the part of the KV host cache that live requests do not use. KV of live requests has
priority: the least recently used copies are evicted for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpupoold.memory.geometry import KvRow
from gpupoold.memory.host import HostSlot, KvHostCache, lay

# Consecutive blocks of a request that are evicted together: allocations cost time each.
_SEGMENT_BLOCKS = 8


@dataclass(eq=False, slots=True)
class _Segment:
    """Some blocks of an engine, in one slot; not evicted while in use."""

    owner: str
    keys: list[bytes]
    slot: HostSlot
    num_users: int = 0
    has_arrived: bool = False
    is_lost: bool = False
    """True if a copy failed."""
    addresses: list[int] = field(default_factory=list)
    """Host address of each block; the bytes of a block are row after row."""

    def __post_init__(self) -> None:
        block_bytes = self.slot.num_bytes // len(self.keys)
        for address, num_bytes in self.slot.pieces():
            self.addresses += range(address, address + num_bytes, block_bytes)


class _StoredBlock(NamedTuple):
    segment: _Segment
    position: int


class StoredBlocks:
    """The copies of some blocks in their order, a :class:`~gpupoold.memory.host.Slot`.

    The copies stay until ``free``.
    """

    def __init__(
        self, store: PrefixStore, places: Sequence[_StoredBlock], rows: Sequence[KvRow]
    ) -> None:
        """``rows`` are the rows of the model's KV buffer."""
        self._store = store
        self._places = places
        self._rows = rows
        self._segments = list(dict.fromkeys(place.segment for place in places))
        store.pin(self._segments)

    @property
    def num_bytes(self) -> int:
        return len(self._places) * sum(row.num_bytes for row in self._rows)

    def beside(self, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        return lay(extents, self._pieces())

    def free(self) -> None:
        """Let the copies be evicted, unless others use the copies."""
        self._store.unpin(self._segments)

    def note_arrival(self, has_arrived: bool) -> None:
        """Make the copies usable, or lost; callable by any thread."""
        for segment in self._segments:
            segment.is_lost = not has_arrived
            segment.has_arrived = has_arrived

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the host memory row by row, adjacent pieces joined."""
        pieces: list[tuple[int, int]] = []
        offset = 0
        for row in self._rows:
            for segment, position in self._places:
                address = segment.addresses[position] + offset
                if pieces and sum(pieces[-1]) == address:
                    pieces[-1] = (pieces[-1][0], pieces[-1][1] + row.num_bytes)
                else:
                    pieces.append((address, row.num_bytes))
            offset += row.num_bytes
        return pieces


class PrefixStore:
    """Copies of KV blocks in a KV host cache, within a byte budget; for one thread.

    An ``owner`` is the name of an engine; equal keys of different engines do not meet.
    """

    def __init__(self, host: KvHostCache, budget_bytes: int | None = None) -> None:
        """Use at most ``budget_bytes`` of ``host``, or by default all that is free."""
        self._host = host
        self._budget_bytes = host.budget_bytes if budget_bytes is None else budget_bytes
        self._places: dict[str, dict[bytes, _StoredBlock]] = {}
        self._segments: OrderedDict[_Segment, None] = OrderedDict()  # least recently used first
        self._used_bytes = self._pinned_bytes = 0
        host.prefixes = self

    @property
    def used_bytes(self) -> int:
        """Host memory of all copies."""
        return self._used_bytes

    @property
    def evictable_bytes(self) -> int:
        """Host memory of copies that are not in use."""
        return self.used_bytes - self._pinned_bytes

    def has(self, owner: str, key: bytes) -> bool:
        """Return whether a block has been copied."""
        place = self._places.get(owner, {}).get(key)
        return place is not None and place.segment.has_arrived

    def begin(
        self, owner: str, keys: Sequence[bytes], rows: Sequence[KvRow]
    ) -> tuple[list[int], StoredBlocks] | None:
        """Allocate memory for copies of blocks without a copy, from the first on.

        ``keys`` are those of all blocks of a request. Older copies are evicted; blocks without room
        are left out. Returns the indices of the blocks in ``keys`` and their memory, which the
        caller fills, reports by ``note_arrival`` and frees. Returns None if no block is to be
        copied.
        """
        known = self._places.setdefault(owner, {})
        self._touch(known[key].segment for key in reversed(keys) if key in known)
        new = [index for index, key in enumerate(keys) if key not in known]
        indices: list[int] = []
        segments: list[_Segment] = []
        for start in range(0, len(new), _SEGMENT_BLOCKS):
            batch = new[start : start + _SEGMENT_BLOCKS]
            segment = self._add(owner, [keys[index] for index in batch], rows)
            if segment is None:
                break
            self.pin([segment])  # else the next segment could evict this one
            segments.append(segment)
            indices += batch
        if not segments:
            return None
        copies = StoredBlocks(self, [known[keys[index]] for index in indices], rows)
        self.unpin(segments)
        self._touch(reversed(segments))
        return indices, copies

    def take(self, owner: str, keys: Sequence[bytes], rows: Sequence[KvRow]) -> StoredBlocks:
        """Return the copies of blocks that all have one."""
        known = self._places[owner]
        places = [known[key] for key in keys]
        self._touch(place.segment for place in reversed(places))
        return StoredBlocks(self, places, rows)

    def forget(self, owner: str) -> None:
        """Free an engine's copies, none of which may be in use."""
        for segment in [one for one in self._segments if one.owner == owner]:
            self._drop(segment)
        self._places.pop(owner, None)

    def evict_oldest(self) -> bool:
        """Evict the least recently used copies that are not in use; return False without any."""
        segment = next((one for one in self._segments if not one.num_users), None)
        if segment is None:
            return False
        self._drop(segment)
        return True

    def pin(self, segments: Iterable[_Segment]) -> None:
        """Keep segments from eviction."""
        for segment in segments:
            self._pinned_bytes += 0 if segment.num_users else segment.slot.num_bytes
            segment.num_users += 1

    def unpin(self, segments: Iterable[_Segment]) -> None:
        """End one use of segments; a lost segment without another use is freed."""
        for segment in segments:
            segment.num_users -= 1
            if segment.num_users:
                continue
            self._pinned_bytes -= segment.slot.num_bytes
            if segment.is_lost:
                self._drop(segment)

    def check_integrity(self) -> None:
        """Raise AssertionError when places, segments and bytes disagree."""
        assert self.used_bytes == sum(one.slot.num_bytes for one in self._segments)
        in_use = (one.slot.num_bytes for one in self._segments if one.num_users)
        assert self._pinned_bytes == sum(in_use)
        for owner, places in self._places.items():
            for key, (segment, position) in places.items():
                assert segment in self._segments and segment.owner == owner
                assert segment.keys[position] == key
        num_places = sum(map(len, self._places.values()))
        assert num_places == sum(len(segment.keys) for segment in self._segments)

    def _add(self, owner: str, keys: list[bytes], rows: Sequence[KvRow]) -> _Segment | None:
        """Return a new segment, for which older ones are evicted, or None without room."""
        block_bytes = sum(row.num_bytes for row in rows)
        num_bytes = block_bytes * len(keys)
        while self.used_bytes + num_bytes > self._budget_bytes:
            if not self.evict_oldest():
                return None
        slot = self._host.allocate(block_bytes, len(keys))
        if slot is None:
            return None
        segment = _Segment(owner, keys, slot)
        self._segments[segment] = None
        self._used_bytes += num_bytes
        places = self._places[owner]
        places.update((key, _StoredBlock(segment, at)) for at, key in enumerate(keys))
        return segment

    def _touch(self, segments: Iterable[_Segment]) -> None:
        """Count segments as used now, the last most recently."""
        for segment in dict.fromkeys(segments):
            self._segments.move_to_end(segment)

    def _drop(self, segment: _Segment) -> None:
        del self._segments[segment]
        self._used_bytes -= segment.slot.num_bytes
        for key in segment.keys:
            del self._places[segment.owner][key]
        segment.slot.free()
