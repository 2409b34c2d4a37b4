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
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Protocol

from gpupoold.memory.contracts import Copy, Device
from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.regions import Region
from gpupoold.memory.transfers import Transfer, TransferQueue


class BlockLedger(Protocol):
    """The engine's own account of its blocks. Block 0 is its null block and never listed."""

    def hold(self, block_ids: list[int]) -> None:
        """Take free blocks out of the engine's reach; their cached prefixes are forgotten."""

    def give(self, block_ids: list[int]) -> None:
        """Put held blocks back on the engine's free list."""

    def live(self, block_ids: Iterable[int]) -> list[int]:
        """Those of the blocks that a request, or a hold, uses."""

    @property
    def num_free(self) -> int:
        """Blocks the engine could hand out now."""


class Place(Enum):
    """Where a chunk's bytes are."""

    UNBACKED = auto()  # nowhere
    DEVICE = auto()
    LEAVING = auto()  # being copied to the host; still whole on the device
    HOST = auto()
    ARRIVING = auto()  # being copied to the device; still whole on the host


# Moved together: each row is then mapped by one call for all of them. A few milliseconds of
# an emulated link, less than a chunk of most models on a GPU.
_GROUP_BYTES = 16 << 20

AWAY = (Place.LEAVING, Place.HOST, Place.ARRIVING)


@dataclass(slots=True)
class _Saved:
    """An away chunk: the blocks that had bytes when it left, in the order of its slot."""

    slot: HostSlot
    blocks: list[int]
    held: set[int] = field(default_factory=set)
    move: _Move | None = None


@dataclass(eq=False, slots=True)
class _Move:
    """Chunks that leave or arrive together, so that neighbours are mapped in one go."""

    chunks: list[int]
    transfer: Transfer


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
        self._saved: dict[int, _Saved] = {}
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
        return sum(saved.slot.num_bytes for saved in self._saved.values())

    @property
    def missing_bytes(self) -> int:
        """Bytes that are neither on the device nor on their way to it."""
        missing = (s for c, s in self._saved.items() if self._place[c] is Place.HOST)
        return sum(saved.slot.num_bytes for saved in missing)

    @property
    def is_whole(self) -> bool:
        """Whether no chunk is away, so that every request can run."""
        return not self._saved

    def is_here(self, blocks: Iterable[int]) -> bool:
        """Whether the bytes of all these blocks are on the device."""
        size, saved = self.geometry.blocks_per_chunk, self._saved
        return not saved or not any(block // size in saved for block in blocks)

    def chunks(self, place: Place) -> list[int]:
        """Chunks at ``place``, lowest first."""
        if place in AWAY:
            return sorted(chunk for chunk in self._saved if self._place[chunk] is place)
        return [chunk for chunk, at in enumerate(self._place) if at is place]

    def chunks_in_order(self, place: Place, blocks: Iterable[int]) -> list[int]:
        """Chunks at ``place``: those of ``blocks`` first, in their order, then the others."""
        wanted = dict.fromkeys(block // self.geometry.blocks_per_chunk for block in blocks)
        rank = {chunk: number for number, chunk in enumerate(wanted)}
        return sorted(self.chunks(place), key=lambda chunk: rank.get(chunk, len(rank)))

    def groups(self, chunks: list[int]) -> Iterator[list[int]]:
        """``chunks`` in order, as many at a time as it takes for mapping them to cost little."""
        chunk_bytes = self.geometry.blocks_per_chunk * self.geometry.block_bytes
        size = max(1, _GROUP_BYTES // chunk_bytes)
        return (chunks[at : at + size] for at in range(0, len(chunks), size))

    def num_missing_pages(self, chunks: list[int]) -> int:
        """Pages that mapping ``chunks`` would take from the pool."""
        return sum(1 for page in self.geometry.uses(chunks) if not self._region.num_holders(page))

    def num_resident_pages(self, chunks: list[int]) -> int:
        """Pages that dropping all of ``chunks`` would free: those no other chunk lies on."""
        uses = self.geometry.uses(chunks)
        return sum(1 for page, count in uses.items() if self._region.num_holders(page) == count)

    @property
    def num_leaving_pages(self) -> int:
        """Pages that come free when what is being copied to the host has got there."""
        leaving = self.chunks(Place.LEAVING) if self._saved else []
        return self.num_resident_pages(leaving) if leaving else 0

    def live_blocks(self, chunk: int) -> list[int]:
        """Blocks of a chunk that requests use."""
        saved = self._saved.get(chunk)
        blocks = self._engine().live(self._real(self.geometry.blocks(chunk)))
        return [b for b in blocks if b not in saved.held] if saved and saved.held else blocks

    @property
    def num_live_blocks(self) -> int:
        """Blocks of chunks on the device that requests use."""
        ranges = (self.geometry.blocks(chunk) for chunk in self.chunks(Place.DEVICE))
        return len(self._engine().live(block for blocks in ranges for block in blocks if block))

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
        unbacked = (self.geometry.blocks(chunk) for chunk in self.chunks(Place.UNBACKED))
        ballast = [block for blocks in unbacked for block in self._real(blocks)]
        ballast += [block for saved in self._saved.values() for block in saved.held]
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
        leaving: list[int] = []
        num_done = 0
        for chunk in chunks:
            assert self._place[chunk] is Place.DEVICE
            live = self.live_blocks(chunk)
            slot = self._host.allocate(self.geometry.block_bytes, len(live)) if live else None
            if live and slot is None:
                break
            num_done += 1
            if slot is None:
                self.unback([chunk])
                continue
            saved = self._saved[chunk] = _Saved(slot, live)
            self._hold(saved, set(self._real(self.geometry.blocks(chunk))) - set(live))
            leaving.append(chunk)
        if leaving:
            copies = [Copy(h, d, n) for c in leaving for d, h, n in self._pieces(self._saved[c])]
            self._begin(_Move(leaving, queue.begin(copies)), Place.LEAVING)
        return num_done

    def begin_page_in(self, chunks: list[int], queue: TransferQueue) -> None:
        """Start to bring chunks back under the same block ids; ``settle`` ends it.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert all(self._place[chunk] is Place.HOST for chunk in chunks)
        fresh = self._retain(chunks, is_filled=False)
        blocks = sorted(block for chunk in chunks for block in self._saved[chunk].blocks)
        for offset, num_bytes in self.geometry.gaps(fresh, blocks):
            self._device.zero(self.address + offset, num_bytes)
        if not chunks:
            return
        copies = [Copy(d, h, n) for c in chunks for d, h, n in self._pieces(self._saved[c])]
        self._begin(_Move(chunks, queue.begin(copies)), Place.ARRIVING)

    def settle(self) -> None:
        """Take note of the transfers that have ended.

        Raises:
            Exception: a copy failed; its chunks are where they were before.
        """
        moves = {saved.move: None for saved in self._saved.values() if saved.move}
        for move in moves:
            if move.transfer.has_ended:
                self._finish(move)

    def oldest_transfer(self, place: Place) -> Transfer | None:
        """The first of the transfers of chunks ``LEAVING`` or ``ARRIVING``."""
        moving = (s for c, s in self._saved.items() if self._place[c] is place)
        return next((saved.move.transfer for saved in moving if saved.move), None)

    def stop_leaving(self) -> None:
        """What is on its way to the host stays on the device after all."""
        self._stop_all(Place.LEAVING)

    def stop_arriving(self) -> None:
        """What is on its way to the device stays on the host, but for what has arrived."""
        self._stop_all(Place.ARRIVING)

    def discard_dead(self) -> None:
        """Take note that requests have ended: keep the engine from blocks of away chunks, and
        let go of chunks that nobody needs any more (those under way when they have come)."""
        for chunk in list(self._saved):
            saved = self._saved[chunk]
            live = set(self.live_blocks(chunk))
            self._hold(saved, set(saved.blocks) - live - saved.held)
            if not live and self._place[chunk] is Place.HOST:
                self._let_go(chunk)

    def close(self) -> None:
        """Stop transfers, free host slots and the region; the engine must be gone."""
        for saved in self._saved.values():
            if saved.move is not None:
                saved.move.transfer.stop()
            saved.slot.free()
        self._saved.clear()
        self._region.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the region disagree."""
        self._region.check_integrity()
        assert set(self._saved) == {chunk for place in AWAY for chunk in self.chunks(place)}
        mapped = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)
        chunks = [chunk for place in mapped for chunk in self.chunks(place)]
        assert len(self.geometry.uses(chunks)) == self._region.num_mapped
        for chunk, saved in self._saved.items():
            free = set(self._real(self.geometry.blocks(chunk))) - set(saved.blocks)
            assert free <= saved.held, f"free blocks of away chunk {chunk} are not held"
            assert self._engine().live(saved.blocks) == saved.blocks
            assert (saved.move is None) == (self._place[chunk] is Place.HOST)

    def _begin(self, move: _Move, place: Place) -> None:
        for chunk in move.chunks:
            self._saved[chunk].move = move
            self._place[chunk] = place

    def _finish(self, move: _Move) -> None:
        is_leaving = self._place[move.chunks[0]] is Place.LEAVING
        try:
            move.transfer.wait()
        except BaseException:
            self._settle_at(move.chunks, Place.DEVICE if is_leaving else Place.HOST)
            raise
        self._settle_at(move.chunks, Place.HOST if is_leaving else Place.DEVICE)

    def _settle_at(self, chunks: list[int], place: Place) -> None:
        if place is Place.HOST:
            self._are_out(chunks)
        else:
            self._are_back(chunks)

    def _stop_all(self, place: Place) -> None:
        moves = {s.move: None for c, s in self._saved.items() if s.move and self._place[c] is place}
        for move in moves:
            move.transfer.cancel()  # else the next would begin while the first is waited for
        for move in moves:
            num_copied = move.transfer.stop()
            is_here = place is Place.LEAVING or num_copied == move.transfer.num_bytes
            self._settle_at(move.chunks, Place.DEVICE if is_here else Place.HOST)

    def _are_back(self, chunks: list[int]) -> None:
        """All of these chunks is on the device."""
        for chunk in chunks:
            saved = self._saved.pop(chunk)
            saved.slot.free()
            self._place[chunk] = Place.DEVICE
            self._engine().give(sorted(saved.held))

    def _are_out(self, chunks: list[int]) -> None:
        """All of these chunks is on the host, and only there."""
        self._drop(chunks)
        for chunk in chunks:
            self._saved[chunk].move = None
            self._place[chunk] = Place.HOST
            if not self.live_blocks(chunk):
                self._let_go(chunk)

    def _let_go(self, chunk: int) -> None:
        """Of a chunk on the host that nobody needs."""
        saved = self._saved.pop(chunk)
        saved.slot.free()
        self._place[chunk] = Place.UNBACKED

    def _hold(self, saved: _Saved, blocks: set[int]) -> None:
        self._engine().hold(sorted(blocks))
        saved.held |= blocks

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

    def _pieces(self, saved: _Saved) -> Iterator[tuple[int, int, int]]:
        """``(device address, host address, num_bytes)``: in the slot, rows follow each other."""
        extents = self.geometry.extents(saved.blocks)
        return saved.slot.beside((self.address + offset, size) for offset, size in extents)

    def _real(self, blocks: range) -> list[int]:
        return [block for block in blocks if block != 0]

    def _engine(self) -> BlockLedger:
        assert self._ledger is not None, "attach() comes first"
        return self._ledger
