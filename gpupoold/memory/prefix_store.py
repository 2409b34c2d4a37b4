"""KV of ended requests in host memory, by vLLM's hashes of blocks.

The copies fill the part of the KV host cache that live requests do not use. KV of live requests has
priority: the least recently used copies are evicted for it.

The copies of owners with a lasting name are entered in the cache's table
(:mod:`gpupoold.memory.host`), so that the next worker of the device has them too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpupoold.memory.host import KEY_BYTES, MAX_BLOCKS, OWNER_BYTES, HostSlot, KvHostCache, lay
from gpupoold.memory.kv_extents import KvRow
from gpupoold.memory.slabs import BlockPlace


@dataclass(eq=False, slots=True)
class _Segment:
    """Some blocks of an owner, in one slot; not evicted while in use.

    ``record`` is the segment's number in the table, if the table has the segment.
    """

    owner: str
    keys: Sequence[bytes]
    slot: HostSlot
    record: int | None = None
    num_users: int = 0
    has_arrived: bool = False
    is_lost: bool = False
    """True if a copy failed."""
    is_forgotten: bool = False
    """True if nobody may find the segment any more."""
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

    @property
    def places(self) -> list[BlockPlace]:
        """The places of the blocks in the KV host cache."""
        places = {segment: segment.slot.blocks.places for segment in self._segments}
        return [places[segment][position] for segment, position in self._places]

    def beside(self, extents: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        return lay(extents, self._pieces())

    def free(self) -> None:
        """Let the copies be evicted, unless others use the copies."""
        self._store.unpin(self._segments)

    def note_arrival(self, has_arrived: bool) -> None:
        """Make the copies usable, or lost; callable by any thread."""
        for segment in self._segments:
            if has_arrived:
                self._store.note_arrival(segment)
            else:
                segment.is_lost = True

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

    An ``owner`` names KV that engines may share; equal keys of different owners do not meet. A name
    of 64 hexadecimal digits lasts: it means the same KV in other processes.
    """

    def __init__(self, host: KvHostCache, budget_bytes: int | None = None) -> None:
        """Use at most ``budget_bytes`` of ``host``, or by default all that is free."""
        assert host.table is not None, "a cache without memory keeps no prefixes"
        self._host, self._table = host, host.table
        self._budget_bytes = host.budget_bytes if budget_bytes is None else budget_bytes
        self._places: dict[str, dict[bytes, _StoredBlock]] = {}
        self._segments: OrderedDict[_Segment, None] = OrderedDict()  # least recently used first
        self.used_bytes = self._pinned_bytes = 0
        self.keeps_unwritten = False
        """True if ``take_unwritten`` is called."""
        self._unwritten: dict[_Segment, None] = {}
        host.prefixes = self
        self._restore()

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
        for start in range(0, len(new), MAX_BLOCKS):
            batch = new[start : start + MAX_BLOCKS]
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

    def take_unwritten(
        self, max_bytes: int
    ) -> Iterator[tuple[str, Sequence[bytes], int, StoredBlocks]]:
        """Yield lasting copies that were not yielded before, of up to ``max_bytes``.

        Yields owner, keys, bytes of a block, and the blocks, which the caller frees.
        """
        left_bytes = max_bytes
        for segment in [segment for segment in self._unwritten if segment.has_arrived]:
            left_bytes -= segment.slot.num_bytes
            if left_bytes < 0 and segment.slot.num_bytes < max_bytes:
                return
            del self._unwritten[segment]
            block_bytes = segment.slot.num_bytes // len(segment.keys)
            places = [_StoredBlock(segment, at) for at in range(len(segment.keys))]
            copies = StoredBlocks(self, places, [KvRow(0, block_bytes, block_bytes)])
            yield segment.owner, segment.keys, block_bytes, copies

    def forget(self, prefix: str) -> None:
        """Free the copies of owners whose names begin with ``prefix``, at the end of their use."""
        for segment in [segment for segment in self._segments if segment.owner.startswith(prefix)]:
            if segment.num_users:
                self._hide(segment)
            else:
                self._drop(segment)
        for owner in [owner for owner, places in self._places.items() if not places]:
            del self._places[owner]

    def evict_oldest(self) -> bool:
        """Evict the least recently used copies that are not in use; return False without any."""
        segment = next((segment for segment in self._segments if not segment.num_users), None)
        if segment is None:
            return False
        self._drop(segment)
        return True

    def note_arrival(self, segment: _Segment) -> None:
        """Make a segment in use usable for others; callable by any thread."""
        segment.has_arrived = True
        if segment.record is not None:
            self._table.note_arrival(segment.record)

    def pin(self, segments: Iterable[_Segment]) -> None:
        """Keep segments from eviction."""
        for segment in segments:
            self._pinned_bytes += 0 if segment.num_users else segment.slot.num_bytes
            segment.num_users += 1

    def unpin(self, segments: Iterable[_Segment]) -> None:
        """End one use of segments; lost and forgotten segments without another use are freed."""
        for segment in segments:
            segment.num_users -= 1
            if segment.num_users:
                continue
            self._pinned_bytes -= segment.slot.num_bytes
            if segment.is_lost or segment.is_forgotten:
                self._drop(segment)

    def check_integrity(self) -> None:
        """Raise AssertionError when places, segments and bytes disagree."""
        assert self.used_bytes == sum(segment.slot.num_bytes for segment in self._segments)
        in_use = (segment.slot.num_bytes for segment in self._segments if segment.num_users)
        assert self._pinned_bytes == sum(in_use)
        for owner, places in self._places.items():
            for key, (segment, position) in places.items():
                assert segment in self._segments and segment.owner == owner
                assert segment.keys[position] == key
        num_places = sum(map(len, self._places.values()))
        known = (segment for segment in self._segments if not segment.is_forgotten)
        assert num_places == sum(len(segment.keys) for segment in known)
        recorded = {segment.record for segment in self._segments if segment.record is not None}
        assert self._table.numbers == recorded

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
        if _is_lasting(owner, keys):
            name, places = bytes.fromhex(owner), slot.blocks.places
            segment.record = self._table.add(name, block_bytes, keys, places)
        self._enter(segment)
        return segment

    def _restore(self) -> None:
        """Take over the copies of the cache's former process, least recently used first."""
        for record in self._table.open_for_writing():
            slot, owner = self._host.claim(record), record.owner.hex()
            known = self._places.get(owner, {})
            if slot is not None and known.keys().isdisjoint(record.keys):
                self._enter(_Segment(owner, record.keys, slot, record.number, has_arrived=True))
                continue
            self._table.remove(record.number)
            if slot is not None:
                slot.free()
        while self.used_bytes > self._budget_bytes and self.evict_oldest():
            pass

    def _enter(self, segment: _Segment) -> None:
        self._segments[segment] = None
        self.used_bytes += segment.slot.num_bytes
        places = self._places.setdefault(segment.owner, {})
        places.update((key, _StoredBlock(segment, at)) for at, key in enumerate(segment.keys))
        if self.keeps_unwritten and segment.record is not None:
            self._unwritten[segment] = None

    def _touch(self, segments: Iterable[_Segment]) -> None:
        for segment in dict.fromkeys(segments):
            self._segments.move_to_end(segment)
            if segment.record is not None:
                self._table.note_use(segment.record)

    def _drop(self, segment: _Segment) -> None:
        del self._segments[segment]
        self.used_bytes -= segment.slot.num_bytes
        self._hide(segment)
        if segment.record is not None:
            self._table.remove(segment.record)
        segment.slot.free()

    def _hide(self, segment: _Segment) -> None:
        self._unwritten.pop(segment, None)
        if not segment.is_forgotten:
            for key in segment.keys:
                del self._places[segment.owner][key]
        segment.is_forgotten = True


def _is_lasting(owner: str, keys: Sequence[bytes]) -> bool:
    """Return whether copies mean the same in other processes."""
    return len(owner) == 2 * OWNER_BYTES and all(len(key) == KEY_BYTES for key in keys)
