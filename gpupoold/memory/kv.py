"""A model's KV memory: which blocks the engine may use, and where their bytes are.

vLLM believes in a large fixed pool of blocks. Only the blocks of *backed*
chunks have pages; the others are held back from its free list ("ballast"), so
running out of pages is a scheduling decision and never a fault. A paused
model's chunks may be moved to host memory below its block tables, and come
back under the same block numbers.

A chunk that is not whole on the device is *away*. The engine may not run requests
with blocks in it, and gets none of its blocks: those that are free are held until it
is back, so that no copy ever writes where the engine does.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

from gpupoold.memory.contracts import BlockLedger, Copy, Device
from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.regions import Region
from gpupoold.memory.transfers import Transfer, TransferQueue


class Place(Enum):
    """Where a chunk's bytes are."""

    UNBACKED = auto()  # nowhere
    DEVICE = auto()
    LEAVING = auto()  # being copied to the host; still whole on the device
    HOST = auto()
    ARRIVING = auto()  # being copied to the device; still whole on the host


# Moved together: each row is then mapped by one call, and copied in one piece. A few
# milliseconds of an emulated link, less than a chunk of most models on a GPU.
_GROUP_BYTES = 32 << 20
# Of a small device: so that not all requests wait for one copy.
_MIN_GROUPS = 8

AWAY = (Place.LEAVING, Place.HOST, Place.ARRIVING)


@dataclass(eq=False, slots=True)
class _Group:
    """Chunks that are away, together from when they left until they are back.

    ``blocks`` had bytes when they left; the slot has them row by row, so that neighbours are
    copied in one piece. ``held`` are those that the engine must not have until then.
    """

    chunks: list[int]
    slot: HostSlot
    blocks: list[int]
    held: set[int] = field(default_factory=set)
    transfer: Transfer | None = None


class KvMemory:
    """Backs, frees, pages out and pages in the chunks of one model's KV region."""

    def __init__(
        self, geometry: KvGeometry, region: Region, device: Device, host: KvHostCache
    ) -> None:
        self.geometry = geometry
        self._region = region
        self._device = device
        self._host = host
        self._place = [Place.UNBACKED] * geometry.num_chunks
        self._away: dict[int, _Group] = {}  # by chunk
        self._ledger: BlockLedger | None = None

    def attach(self, ledger: BlockLedger) -> None:
        """Take every block from the engine; ``back`` gives them out again."""
        self._ledger = ledger
        ledger.hold(self._real(range(self.geometry.num_blocks)))

    @property
    def address(self) -> int:
        """Start of the KV buffer."""
        return self._region.address

    @property
    def physical_pages(self) -> list[int]:
        """Pages of the pool that it has."""
        return self._region.physical_pages

    @property
    def resident_bytes(self) -> int:
        """Device bytes of this region."""
        return self._region.num_mapped * self._device.page_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes of the chunks that are away."""
        return sum(group.slot.num_bytes for group in self._groups())

    @property
    def missing_bytes(self) -> int:
        """Bytes that are neither on the device nor on their way to it."""
        return sum(group.slot.num_bytes for group in self._groups(Place.HOST))

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is away, so that every request can run."""
        return not self._away

    def is_here(self, blocks: Iterable[int]) -> bool:
        """Whether the bytes of all these blocks are on the device."""
        size, away = self.geometry.blocks_per_chunk, self._away
        return not away or not any(block // size in away for block in blocks)

    def chunks(self, place: Place) -> list[int]:
        """Chunks at ``place``, lowest first."""
        if place in AWAY:
            return sorted(chunk for chunk in self._away if self._place[chunk] is place)
        return [chunk for chunk, at in enumerate(self._place) if at is place]

    def chunks_in_order(self, place: Place, blocks: Iterable[int]) -> list[int]:
        """Chunks at ``place``: those of ``blocks`` first, in their order, then the others."""
        wanted = dict.fromkeys(block // self.geometry.blocks_per_chunk for block in blocks)
        rank = {chunk: number for number, chunk in enumerate(wanted)}
        return sorted(self.chunks(place), key=lambda chunk: rank.get(chunk, len(rank)))

    def cut(self, chunks: list[int]) -> Iterator[list[int]]:
        """``chunks`` in order, as many at a time as had better be paged out together."""
        chunk_bytes = self.geometry.blocks_per_chunk * self.geometry.block_bytes
        group_bytes = min(_GROUP_BYTES, self.geometry.total_bytes // _MIN_GROUPS)
        size = max(1, group_bytes // chunk_bytes)
        return (chunks[at : at + size] for at in range(0, len(chunks), size))

    def groups_on_host(self, blocks: Iterable[int]) -> list[list[int]]:
        """Chunks that can be paged in, together: those of ``blocks`` first, in their order."""
        chunks = self.chunks_in_order(Place.HOST, blocks)
        return [group.chunks for group in dict.fromkeys(self._away[chunk] for chunk in chunks)]

    def num_missing_pages(self, chunks: list[int]) -> int:
        """Pages that mapping ``chunks`` would take from the pool."""
        if self.geometry.is_aligned:
            return sum(map(self._region.num_missing, self.geometry.spans(chunks)))
        pages = self.geometry.uses(chunks)
        return sum(1 for page in pages if not self._region.num_holders(page))

    def num_resident_pages(self, chunks: list[int]) -> int:
        """Pages that dropping all of ``chunks`` would free: those no other chunk lies on."""
        if self.geometry.is_aligned:
            return sum(map(len, self.geometry.spans(chunks)))
        uses = self.geometry.uses(chunks)
        return sum(1 for page, count in uses.items() if self._region.num_holders(page) == count)

    @property
    def num_leaving_pages(self) -> int:
        """Pages that come free when what is being copied to the host has got there."""
        leaving = self.chunks(Place.LEAVING) if self._away else []
        return self.num_resident_pages(leaving) if leaving else 0

    def live_blocks(self, chunk: int) -> list[int]:
        """Blocks of a chunk that requests use."""
        group = self._away.get(chunk)
        blocks = self._engine().live(self._real(self.geometry.blocks(chunk)))
        return [b for b in blocks if b not in group.held] if group else blocks

    @property
    def num_live_blocks(self) -> int:
        """Blocks of chunks on the device that requests use."""
        return len(self._engine().live(self._real_of(self.chunks(Place.DEVICE))))

    def free_chunks(self) -> list[int]:
        """Chunks on the device without a live block, highest first: cheap to take away."""
        device = self.chunks(Place.DEVICE)
        return [chunk for chunk in reversed(device) if not self.live_blocks(chunk)]

    def back(self, chunks: list[int]) -> None:
        """Map zeroed pages for unbacked ``chunks`` and give their blocks to the engine.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert all(self._place[chunk] is Place.UNBACKED for chunk in chunks)
        self._retain(chunks, is_filled=True)
        for chunk in chunks:
            self._place[chunk] = Place.DEVICE
            self._engine().give(self._real(self.geometry.blocks(chunk)))

    def unback(self, chunks: list[int]) -> None:
        """Take away ``chunks`` that have no live block; cached prefixes in them are forgotten."""
        assert all(self._place[chunk] is Place.DEVICE for chunk in chunks)
        for chunk in chunks:
            self._engine().hold(self._real(self.geometry.blocks(chunk)))
            self._place[chunk] = Place.UNBACKED
        self._drop(chunks)

    @contextlib.contextmanager
    def without_ballast(self) -> Iterator[None]:
        """Let the engine have all its blocks for an operation that wants the pool whole.

        Nothing may be scheduled meanwhile: most of the blocks have no pages.
        """
        ballast = self._real_of(self.chunks(Place.UNBACKED))
        ballast += [block for group in self._groups() for block in group.held]
        self._engine().give(ballast)
        try:
            yield
        finally:
            self._engine().hold(ballast)

    def begin_page_out(self, chunks: list[int], queue: TransferQueue) -> int:
        """Start to move the live blocks of chunks to the host, until the host is full.

        Returns how many of ``chunks``, from the first on, the host had room for. The model
        must be paused. Pages come free with the ``settle`` after the transfer; those of
        chunks without a live block now. Cached prefixes in free blocks are forgotten: their
        bytes do not travel.
        """
        assert all(self._place[chunk] is Place.DEVICE for chunk in chunks)
        live = [self._engine().live(self._real(self.geometry.blocks(c))) for c in chunks]
        room = self._host.num_free_blocks(self.geometry.block_bytes)
        totals = itertools.accumulate(map(len, live))
        num_done = sum(1 for _ in itertools.takewhile(lambda total: total <= room, totals))
        done = list(zip(chunks, live, strict=True))[:num_done]
        self.unback([chunk for chunk, blocks in done if not blocks])
        leaving = sorted(chunk for chunk, blocks in done if blocks)
        if leaving:
            blocks = sorted(block for _, some in done for block in some)
            slot = self._host.allocate(self.geometry.block_bytes, len(blocks))
            assert slot is not None
            group = _Group(leaving, slot, blocks)
            self._hold(group, set(self._real_of(leaving)) - set(blocks))
            self._away |= dict.fromkeys(leaving, group)
            group.transfer = queue.begin([Copy(h, d, n) for d, h, n in self._pieces(group)])
            self._put(group, Place.LEAVING)
        return num_done

    def begin_page_in(self, chunk: int, queue: TransferQueue) -> None:
        """Start to bring a chunk, and those that left with it, back under the same block ids;
        ``settle`` ends it.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert self._place[chunk] is Place.HOST
        group = self._away[chunk]
        fresh = self._retain(group.chunks, is_filled=False)
        for offset, num_bytes in self.geometry.gaps(fresh, group.blocks):
            self._device.zero(self.address + offset, num_bytes)
        group.transfer = queue.begin([Copy(d, h, n) for d, h, n in self._pieces(group)])
        self._put(group, Place.ARRIVING)

    def settle(self) -> None:
        """Take note of the transfers that have ended.

        Raises:
            Exception: a copy failed; its chunks are where they were before.
        """
        for group in self._groups():
            if group.transfer is not None and group.transfer.has_ended:
                self._finish(group, group.transfer)

    def finish(self, place: Place) -> None:
        """Wait for all chunks ``LEAVING`` or ``ARRIVING`` to have got there.

        Raises:
            Exception: a copy failed; its chunks are where they were before.
        """
        for group in self._groups(place):
            if group.transfer is not None:
                group.transfer.wait()
        self.settle()

    def oldest_transfer(self, place: Place) -> Transfer | None:
        """The first of the transfers of chunks ``LEAVING`` or ``ARRIVING``."""
        return next((group.transfer for group in self._groups(place)), None)

    def stop_leaving(self) -> None:
        """What is on its way to the host stays on the device after all."""
        self._stop(Place.LEAVING)

    def stop_arriving(self) -> None:
        """What is on its way to the device stays on the host, but for what has arrived."""
        self._stop(Place.ARRIVING)

    def discard_dead(self) -> None:
        """Take note that requests have ended: keep the engine from blocks of away chunks, and
        let go of chunks that nobody needs any more (those under way when they have come)."""
        for group in self._groups():
            wanted = [block for block in group.blocks if block not in group.held]
            self._hold(group, set(wanted) - set(self._engine().live(wanted)))
            if group.transfer is None and self._is_dead(group):
                self._let_go(group)

    def close(self) -> None:
        """Stop transfers, free host slots and the region; the engine must be gone."""
        for group in self._groups():
            if group.transfer is not None:
                group.transfer.stop()
            group.slot.free()
        self._away.clear()
        self._region.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the region disagree."""
        self._region.check_integrity()
        assert set(self._away) == {chunk for place in AWAY for chunk in self.chunks(place)}
        mapped = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)
        chunks = [chunk for place in mapped for chunk in self.chunks(place)]
        assert len(self.geometry.uses(chunks)) == self._region.num_mapped
        for group in self._groups():
            [place] = {self._place[chunk] for chunk in group.chunks}
            idle = set(self._real_of(group.chunks)) - set(group.blocks)
            assert idle <= group.held, f"free blocks of away chunks {group.chunks} are not held"
            assert self._engine().live(group.blocks) == group.blocks
            assert (group.transfer is None) == (place is Place.HOST)

    def _groups(self, place: Place | None = None) -> list[_Group]:
        """Those at ``place``, or all, in the order in which they left."""
        groups = dict.fromkeys(self._away.values())
        return [g for g in groups if place is None or self._place[g.chunks[0]] is place]

    def _is_dead(self, group: _Group) -> bool:
        """Whether no request needs any block of it."""
        return len(group.held) == len(self._real_of(group.chunks))

    def _put(self, group: _Group, place: Place) -> None:
        for chunk in group.chunks:
            self._place[chunk] = place

    def _finish(self, group: _Group, transfer: Transfer) -> None:
        is_leaving = self._place[group.chunks[0]] is Place.LEAVING
        try:
            transfer.wait()
        except BaseException:
            self._settle_at(group, Place.DEVICE if is_leaving else Place.HOST)
            raise
        self._settle_at(group, Place.HOST if is_leaving else Place.DEVICE)

    def _stop(self, place: Place) -> None:
        moving = [(group, group.transfer) for group in self._groups(place) if group.transfer]
        for _, transfer in moving:
            transfer.cancel()  # else the next would begin while the first is waited for
        for group, transfer in moving:
            num_copied = transfer.stop()
            is_here = place is Place.LEAVING or num_copied == transfer.num_bytes
            self._settle_at(group, Place.DEVICE if is_here else Place.HOST)

    def _settle_at(self, group: _Group, place: Place) -> None:
        """All of a group is on the device, or on the host and only there."""
        group.transfer = None
        self._put(group, place)
        if place is Place.HOST:
            self._drop(group.chunks)
            if self._is_dead(group):
                self._let_go(group)
            return
        self._forget(group)
        self._engine().give(sorted(group.held))

    def _let_go(self, group: _Group) -> None:
        """Of a group on the host that nobody needs."""
        self._forget(group)
        self._put(group, Place.UNBACKED)

    def _forget(self, group: _Group) -> None:
        for chunk in group.chunks:
            del self._away[chunk]
        group.slot.free()

    def _hold(self, group: _Group, blocks: set[int]) -> None:
        self._engine().hold(sorted(blocks))
        group.held |= blocks

    def _retain(self, chunks: list[int], *, is_filled: bool) -> list[range]:
        """Map chunks; returns the pages that were not mapped before."""
        held: list[range] = []
        fresh: list[range] = []
        try:
            for span in self.geometry.spans(chunks):
                fresh += self._region.retain(span, is_filled=is_filled)
                held.append(span)
        except BaseException:
            for span in held:
                self._region.drop(span)
            raise
        return fresh

    def _drop(self, chunks: list[int]) -> None:
        for span in self.geometry.spans(chunks):
            self._region.drop(span)

    def _pieces(self, group: _Group) -> Iterator[tuple[int, int, int]]:
        """``(device address, host address, num_bytes)``: in the slot, rows follow each other."""
        extents = self.geometry.extents(group.blocks)
        return group.slot.beside((self.address + offset, size) for offset, size in extents)

    def _real(self, blocks: range) -> range:
        return blocks if blocks.start else blocks[1:]

    def _real_of(self, chunks: list[int]) -> list[int]:
        return [b for chunk in chunks for b in self._real(self.geometry.blocks(chunk))]

    def _engine(self) -> BlockLedger:
        assert self._ledger is not None, "attach() comes first"
        return self._ledger
