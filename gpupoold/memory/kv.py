"""A model's KV memory: which blocks the engine may use, and where their bytes are.

vLLM believes in a large fixed pool of blocks. Only the blocks of *backed*
chunks have pages; the others are held back from its free list ("ballast"), so
running out of pages is a scheduling decision and never a fault. A paused
model's chunks may be moved to host memory below its block tables.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from enum import Enum, auto
from typing import Protocol

from gpupoold.memory.contracts import Device
from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.regions import Region


class BlockLedger(Protocol):
    """The engine's own account of its blocks. Block 0 is its null block and never listed."""

    def hold(self, block_ids: list[int]) -> None:
        """Take free blocks out of the engine's reach; their cached prefixes are forgotten."""

    def give(self, block_ids: list[int]) -> None:
        """Put held blocks back on the engine's free list."""

    def is_live(self, block_id: int) -> bool:
        """Whether a request (or the ledger's own hold) uses the block."""

    def forget(self, block_ids: list[int]) -> None:
        """Drop the blocks' cached prefixes; their bytes will be lost."""

    @property
    def num_free(self) -> int:
        """Blocks the engine could hand out now."""


class Place(Enum):
    """Where a chunk's bytes are."""

    UNBACKED = auto()
    DEVICE = auto()
    HOST = auto()


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
        self._saved: dict[int, tuple[HostSlot, list[int]]] = {}
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
    def resident_bytes(self) -> int:
        """Device bytes of this region."""
        return self._region.num_mapped * self._device.page_bytes

    @property
    def host_bytes(self) -> int:
        """Host bytes of chunks that were paged out."""
        return sum(num_bytes for slot, _ in self._saved.values() for _, num_bytes in slot.pieces())

    def chunks(self, place: Place) -> list[int]:
        """Chunks at ``place``, lowest first."""
        return [chunk for chunk, at in enumerate(self._place) if at is place]

    def num_missing_pages(self, chunks: list[int]) -> int:
        """Pages that mapping ``chunks`` would take from the pool."""
        return sum(1 for page in self._uses(chunks) if not self._region.num_holders(page))

    def num_resident_pages(self, chunks: list[int]) -> int:
        """Pages that dropping all of ``chunks`` would free: those no other chunk lies on."""
        uses = self._uses(chunks)
        return sum(1 for page, count in uses.items() if self._region.num_holders(page) == count)

    def live_blocks(self, chunk: int) -> list[int]:
        """Blocks of a backed chunk that requests use."""
        ledger = self._engine()
        return [b for b in self._real(self.geometry.blocks(chunk)) if ledger.is_live(b)]

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
            self._retain(chunk)
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
        unbacked = [
            block
            for chunk in self.chunks(Place.UNBACKED)
            for block in self._real(self.geometry.blocks(chunk))
        ]
        self._engine().give(unbacked)
        try:
            yield
        finally:
            self._engine().hold(unbacked)

    def page_out(self, chunk: int) -> int:
        """Move a chunk's live blocks to the host and free its pages; returns bytes moved.

        The model must be paused. Cached prefixes in free blocks of the chunk
        are forgotten, since their bytes do not travel.

        Raises:
            OutOfPages: the host cache is full; nothing was changed.
        """
        assert self._place[chunk] is Place.DEVICE
        live = self.live_blocks(chunk)
        slot = self._host.allocate(len(live) * self.geometry.block_bytes)
        moved = self._copy(live, slot, to_host=True)
        idle = set(self._real(self.geometry.blocks(chunk))) - set(live)
        self._engine().forget(sorted(idle))
        self._device.synchronize()
        self._drop(chunk)
        self._place[chunk] = Place.HOST
        self._saved[chunk] = (slot, live)
        return moved

    def page_in(self, chunk: int) -> int:
        """Bring a chunk back under the same block ids; returns bytes moved.

        Raises:
            OutOfPages: the pool is short; nothing was changed.
        """
        assert self._place[chunk] is Place.HOST
        self._retain(chunk)
        slot, live = self._saved.pop(chunk)
        moved = self._copy(live, slot, to_host=False)
        self._device.synchronize()
        slot.free()
        self._place[chunk] = Place.DEVICE
        return moved

    def discard_dead(self) -> None:
        """Free the host copies of chunks whose requests have all ended meanwhile."""
        for chunk in list(self._saved):
            if not self.live_blocks(chunk):
                slot, _ = self._saved.pop(chunk)
                slot.free()
                self._engine().hold(self._real(self.geometry.blocks(chunk)))
                self._place[chunk] = Place.UNBACKED

    def close(self) -> None:
        """Free host slots and the region; the engine must be gone."""
        for slot, _ in self._saved.values():
            slot.free()
        self._saved.clear()
        self._region.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when places, host slots and the region disagree."""
        self._region.check_integrity()
        assert set(self._saved) == set(self.chunks(Place.HOST))
        pages = {
            page
            for chunk in self.chunks(Place.DEVICE)
            for span in self.geometry.pages(chunk)
            for page in span
        }
        assert len(pages) == self._region.num_mapped

    def _uses(self, chunks: list[int]) -> Counter[int]:
        """How many rows of ``chunks`` lie on each page they touch."""
        return Counter(p for c in chunks for span in self.geometry.pages(c) for p in span)

    def _retain(self, chunk: int) -> None:
        spans = self.geometry.pages(chunk)
        held: list[range] = []
        try:
            for span in spans:
                self._region.retain(span)
                held.append(span)
        except BaseException:
            for span in held:
                self._region.drop(span)
            raise

    def _drop(self, chunk: int) -> None:
        for span in self.geometry.pages(chunk):
            self._region.drop(span)

    def _copy(self, blocks: list[int], slot: HostSlot, *, to_host: bool) -> int:
        moved = 0
        pieces = _Pieces(slot.pieces())
        for offset, num_bytes in self.geometry.extents(blocks):
            address = self._region.address + offset
            for host_address, length in pieces.take(num_bytes):
                if to_host:
                    self._device.copy_out(host_address, address, length)
                else:
                    self._device.copy_in(address, host_address, length)
                address += length
            moved += num_bytes
        return moved

    def _real(self, blocks: range) -> list[int]:
        return [block for block in blocks if block != 0]

    def _engine(self) -> BlockLedger:
        assert self._ledger is not None, "attach() comes first"
        return self._ledger


class _Pieces:
    """Consumes a list of ``(address, num_bytes)`` pieces from the front."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self._pieces = list(reversed(pieces))

    def take(self, num_bytes: int) -> list[tuple[int, int]]:
        taken = []
        while num_bytes:
            address, length = self._pieces.pop()
            used = min(length, num_bytes)
            taken.append((address, used))
            if used < length:
                self._pieces.append((address + used, length - used))
            num_bytes -= used
        return taken
