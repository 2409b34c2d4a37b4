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
from collections import Counter
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


AWAY = (Place.LEAVING, Place.HOST, Place.ARRIVING)


@dataclass(slots=True)
class _Saved:
    """An away chunk: the blocks that had bytes when it left, in the order of its slot."""

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

    def num_missing_pages(self, chunks: list[int]) -> int:
        """Pages that mapping ``chunks`` would take from the pool."""
        return sum(1 for page in self._uses(chunks) if not self._region.num_holders(page))

    def num_resident_pages(self, chunks: list[int]) -> int:
        """Pages that dropping all of ``chunks`` would free: those no other chunk lies on."""
        uses = self._uses(chunks)
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
            OutOfPages: the pool is short; chunks before the failing one are backed.
        """
        for chunk in chunks:
            assert self._place[chunk] is Place.UNBACKED
            self._retain(chunk, is_filled=True)
            self._place[chunk] = Place.DEVICE
            self._engine().give(self._real(self.geometry.blocks(chunk)))

    def unback(self, chunks: list[int]) -> None:
        """Take away ``chunks`` that have no live block; cached prefixes in them are forgotten."""
        for chunk in chunks:
            assert self._place[chunk] is Place.DEVICE
            self._engine().hold(self._real(self.geometry.blocks(chunk)))
            self._drop(chunk)
            self._place[chunk] = Place.UNBACKED

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

    def begin_page_out(self, chunk: int, queue: TransferQueue) -> bool:
        """Start to move a chunk's live blocks to the host; False when the host has no room.

        The model must be paused. Its pages come free with the ``settle`` after the transfer,
        or now if it has no live block. Cached prefixes in free blocks of the chunk are
        forgotten: their bytes do not travel.
        """
        assert self._place[chunk] is Place.DEVICE
        live = self.live_blocks(chunk)
        if not live:
            self.unback([chunk])
            return True
        slot = self._host.allocate(self.geometry.block_bytes, len(live))
        if slot is None:
            return False
        saved = _Saved(slot, live)
        self._hold(saved, set(self._real(self.geometry.blocks(chunk))) - set(live))
        saved.transfer = queue.begin([Copy(h, d, n) for d, h, n in self._pieces(saved)])
        self._saved[chunk] = saved
        self._place[chunk] = Place.LEAVING
        return True

    def begin_page_in(self, chunk: int, queue: TransferQueue) -> None:
        """Start to bring a chunk back under the same block ids; ``settle`` ends it.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert self._place[chunk] is Place.HOST
        saved = self._saved[chunk]
        fresh = self._retain(chunk, is_filled=False)
        for offset, num_bytes in self.geometry.gaps(fresh, saved.blocks):
            self._device.zero(self.address + offset, num_bytes)
        saved.transfer = queue.begin([Copy(d, h, n) for d, h, n in self._pieces(saved)])
        self._place[chunk] = Place.ARRIVING

    def settle(self) -> None:
        """Take note of the transfers that have ended.

        Raises:
            Exception: a copy failed; its chunk is where it was before.
        """
        for chunk in [c for c, s in self._saved.items() if s.transfer and s.transfer.has_ended]:
            self._finish(chunk)

    def oldest_transfer(self, place: Place) -> Transfer | None:
        """The first of the transfers of chunks ``LEAVING`` or ``ARRIVING``."""
        moving = (s for c, s in self._saved.items() if self._place[c] is place)
        return next((saved.transfer for saved in moving if saved.transfer), None)

    def stop_leaving(self) -> None:
        """What is on its way to the host stays on the device after all."""
        self._stop_all(Place.LEAVING)

    def stop_arriving(self) -> None:
        """What is on its way to the device stays on the host, but for what has arrived."""
        self._stop_all(Place.ARRIVING)

    def discard_dead(self) -> None:
        """Take note that requests have ended: keep the engine from blocks of away chunks, and
        let go of chunks that nobody needs any more."""
        for chunk in list(self._saved):
            saved = self._saved[chunk]
            live = set(self.live_blocks(chunk))
            if live:
                self._hold(saved, set(saved.blocks) - live - saved.held)
            elif self._place[chunk] is Place.LEAVING:
                self._stop(chunk)
            else:
                # Bytes of others may still show on pages that are half filled: they go too.
                self._stop(chunk)
                self._let_go(chunk)

    def close(self) -> None:
        """Stop transfers, free host slots and the region; the engine must be gone."""
        for saved in self._saved.values():
            if saved.transfer is not None:
                saved.transfer.stop()
            saved.slot.free()
        self._saved.clear()
        self._region.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the region disagree."""
        self._region.check_integrity()
        assert set(self._saved) == {chunk for place in AWAY for chunk in self.chunks(place)}
        mapped = (Place.DEVICE, Place.LEAVING, Place.ARRIVING)
        chunks = [chunk for place in mapped for chunk in self.chunks(place)]
        assert len(self._uses(chunks)) == self._region.num_mapped
        for chunk, saved in self._saved.items():
            free = set(self._real(self.geometry.blocks(chunk))) - set(saved.blocks)
            assert free <= saved.held, f"free blocks of away chunk {chunk} are not held"
            assert self._engine().live(saved.blocks) == saved.blocks
            assert (saved.transfer is None) == (self._place[chunk] is Place.HOST)

    def _finish(self, chunk: int) -> None:
        transfer, is_leaving = self._saved[chunk].transfer, self._place[chunk] is Place.LEAVING
        assert transfer is not None
        try:
            transfer.wait()
        except BaseException:
            if is_leaving:
                self._is_back(chunk)
            else:
                self._is_out(chunk)
            raise
        if is_leaving:
            self._is_out(chunk)
        else:
            self._is_back(chunk)

    def _stop_all(self, place: Place) -> None:
        chunks = self.chunks(place)
        transfers = [self._saved[chunk].transfer for chunk in chunks]
        for transfer in transfers:
            if transfer is not None:
                transfer.cancel()  # else the next would begin while the first is waited for
        for chunk in chunks:
            self._stop(chunk)

    def _stop(self, chunk: int) -> None:
        """End a chunk's transfer: it is back, or on the host, or was so already."""
        transfer = self._saved[chunk].transfer
        if transfer is None:
            return
        num_copied = transfer.stop()
        if self._place[chunk] is Place.LEAVING or num_copied == transfer.num_bytes:
            self._is_back(chunk)
        else:
            self._is_out(chunk)

    def _let_go(self, chunk: int) -> None:
        """Of a chunk that nobody needs: what is on the host, or its pages."""
        if self._place[chunk] is Place.DEVICE:
            self.unback([chunk])
            return
        saved = self._saved.pop(chunk)
        saved.slot.free()
        self._hold(saved, set(saved.blocks) - saved.held)
        self._place[chunk] = Place.UNBACKED

    def _is_back(self, chunk: int) -> None:
        """All of a chunk is on the device."""
        saved = self._saved.pop(chunk)
        saved.slot.free()
        self._place[chunk] = Place.DEVICE
        self._engine().give(sorted(saved.held))

    def _is_out(self, chunk: int) -> None:
        """All of a chunk is on the host, and only there."""
        self._saved[chunk].transfer = None
        self._place[chunk] = Place.HOST
        self._drop(chunk)

    def _hold(self, saved: _Saved, blocks: set[int]) -> None:
        self._engine().hold(sorted(blocks))
        saved.held |= blocks

    def _uses(self, chunks: list[int]) -> Counter[int]:
        """How many rows of ``chunks`` lie on each page they touch."""
        return Counter(p for c in chunks for span in self.geometry.pages(c) for p in span)

    def _retain(self, chunk: int, *, is_filled: bool) -> list[range]:
        """Map a chunk's pages; returns those that were not mapped before."""
        held: list[range] = []
        fresh: list[range] = []
        try:
            for span in self.geometry.pages(chunk):
                fresh += self._region.retain(span, is_filled=is_filled)
                held.append(span)
        except BaseException:
            for span in held:
                self._region.drop(span)
            raise
        return fresh

    def _drop(self, chunk: int) -> None:
        for span in self.geometry.pages(chunk):
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
