"""KV blocks of many sizes in one buffer: slabs per shape. Pure bookkeeping, no memory.

Slab allocation as in Aegaeon (SOSP '25, section 5.2). The buffer is cut into *base slabs* of one
size. A *shape* is a block size in bytes: one KV block of a model over all its layers. A *slab* is a
run of base slabs of one shape, cut into its blocks. A shape takes a new slab when no block is free
and returns a slab when none of the slab's blocks is in use.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from gpupoold.memory.pages import PagePool, PageRun

_MAX_BASE_SLABS = 8
_MAX_TAIL_SHARE = 1 / 8
_MIN_SLAB_BYTES = 4 << 10
_MAX_SLAB_BYTES = 1 << 30
_MIN_BASE_SLABS = 256


class Extent(NamedTuple):
    """A piece of the buffer: ``num_bytes`` from ``offset``."""

    offset: int
    num_bytes: int


class BlockPlace(NamedTuple):
    """The place of a block: the first base slab of its slab, and its number there."""

    slab: int
    block: int


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """The layout of blocks of ``block_bytes`` in their slabs."""

    block_bytes: int
    num_base_slabs: int
    """Base slabs in a slab."""
    num_blocks: int
    """Blocks in a slab."""


def slab_bytes_for(budget_bytes: int) -> int:
    """Return the bytes of a base slab: a power of two from 4 KiB to 1 GiB.

    A budget has at least 256 base slabs, unless tiny. More base slabs waste less in half-empty
    slabs, fewer give longer runs to copy; the number matters little with four shapes and much with
    twelve. Measured with 64 GiB, requests of 40 models (the four shapes of the paper's Table 1) or
    48 models (eight smaller shapes in addition) with ShareGPT lengths, over 1000 turns of pausing
    and resuming (``tests/unit/memory/kv_mix.py``). Share of the bytes in slabs that no block used,
    mean over the last 500 turns, with 50, 70 and 90 % of the budget used, and runs per allocation:

        base slabs      four shapes               twelve shapes
        64 x 1 GiB      13 %, 13 %, 9 %, 3.8      23 %, 18 %, 10 %, 1.9
        256 x 256 MiB   10 %,  8 %, 7 %, 6.9      12 %, 11 %,  8 %, 3.3
        1024 x 64 MiB    6 %,  5 %, 5 %, 13        7 %,  6 %,  5 %, 6.3
    """
    share = max(1, budget_bytes // _MIN_BASE_SLABS)
    return min(max(_MIN_SLAB_BYTES, 1 << (share.bit_length() - 1)), _MAX_SLAB_BYTES)


def slab_layout(block_bytes: int, slab_bytes: int, num_base_slabs: int) -> SlabLayout:
    """Return the layout whose slab is the shortest with at most 1/8 unused behind the last block.

    The slab has at most 8 base slabs of ``slab_bytes``, or as many as one block needs, and at most
    ``num_base_slabs``; if every length leaves more unused, the length with the smallest unused
    share is taken. ``num_blocks`` is 0 if not even one block fits.

    Raises ValueError: a block has no bytes.
    """
    if block_bytes <= 0:
        raise ValueError(f"a KV block has {block_bytes} bytes: must be positive")
    least = -(-block_bytes // slab_bytes)
    if least > num_base_slabs:
        return SlabLayout(block_bytes, least, 0)

    def tail_share(length: int) -> float:
        return length * slab_bytes % block_bytes / (length * slab_bytes)

    lengths = range(least, max(least, min(_MAX_BASE_SLABS, num_base_slabs)) + 1)
    short = (length for length in lengths if tail_share(length) <= _MAX_TAIL_SHARE)
    length = next(short, None) or min(lengths, key=tail_share)
    return SlabLayout(block_bytes, length, length * slab_bytes // block_bytes)


@dataclass(eq=False, slots=True)
class _Slab:
    base: PageRun  # in base slabs
    blocks: PagePool


@dataclass(slots=True)
class _Shape:
    layout: SlabLayout
    slabs: set[_Slab] = field(default_factory=set)
    num_used: int = 0

    @property
    def num_blocks(self) -> int:
        return len(self.slabs) * self.layout.num_blocks

    def fullest_first(self) -> list[_Slab]:
        """Return slabs with a free block, fullest first, so that emptier slabs drain."""
        free = [slab for slab in self.slabs if slab.blocks.num_free]
        return sorted(free, key=lambda slab: (slab.blocks.num_free, slab.base.first))


@dataclass(frozen=True, eq=False, slots=True)
class Allocation:
    """Blocks of one shape, until freed."""

    block_bytes: int
    num_blocks: int
    extents: tuple[Extent, ...]
    """The blocks' places in order, whole blocks in each."""
    _runs: tuple[tuple[_Slab, PageRun], ...]

    @property
    def num_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def places(self) -> list[BlockPlace]:
        """The places of the blocks in order, for :meth:`SlabAllocator.claim`."""
        return [
            BlockPlace(slab.base.first, block)
            for slab, run in self._runs
            for block in range(run.first, run.end)
        ]


class SlabAllocator:
    """An allocator of blocks of any shape within a budget; returns None without space."""

    def __init__(self, budget_bytes: int, slab_bytes: int) -> None:
        """Cut ``budget_bytes`` into base slabs of ``slab_bytes``; the rest is not used.

        Raises ValueError: the budget is negative or the slabs have no bytes.
        """
        if budget_bytes < 0 or slab_bytes <= 0:
            raise ValueError(f"{budget_bytes} bytes cannot be cut into slabs of {slab_bytes} bytes")
        self.slab_bytes = slab_bytes
        self._base = PagePool(budget_bytes // slab_bytes)
        self._shapes: dict[int, _Shape] = {}
        self._live: set[Allocation] = set()

    @property
    def num_bytes(self) -> int:
        """Size of the buffer: the budget in whole base slabs."""
        return self._base.num_pages * self.slab_bytes

    @property
    def used_bytes(self) -> int:
        return sum(shape.num_used * size for size, shape in self._shapes.items())

    @property
    def reserved_bytes(self) -> int:
        """Bytes in slabs, used or not."""
        return self.num_bytes - self.free_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes in base slabs without a shape."""
        return self._base.num_free * self.slab_bytes

    def num_free_blocks(self, block_bytes: int) -> int:
        """Return the largest number of blocks of this shape that could be allocated now."""
        shape = self._shape(block_bytes)
        num_new = self._base.num_runs(shape.layout.num_base_slabs)
        return shape.num_blocks - shape.num_used + num_new * shape.layout.num_blocks

    def allocate(self, block_bytes: int, num_blocks: int) -> Allocation | None:
        """Allocate ``num_blocks`` of a shape, all or nothing: None without space.

        Free blocks of the shape's slabs come first, then new slabs; few and long runs within a
        slab.

        Raises ValueError: a block has no bytes, or the number of blocks is negative.
        """
        if num_blocks < 0:
            raise ValueError(f"{num_blocks} KV blocks requested: must not be negative")
        if num_blocks > self.num_free_blocks(block_bytes):
            return None
        shape = self._shape(block_bytes)
        runs = self._take(shape, num_blocks)
        if runs:
            self._shapes[block_bytes] = shape
        extents = _joined(self._extent(slab, run, block_bytes) for slab, run in runs)
        allocation = Allocation(block_bytes, num_blocks, extents, tuple(runs))
        self._live.add(allocation)
        return allocation

    def claim(self, block_bytes: int, places: Iterable[BlockPlace]) -> Allocation | None:
        """Allocate blocks at ``places``, which an allocator of the same size has given before.

        All or nothing: None if a place is in use or does not exist.
        """
        shape = self._shape(block_bytes)
        runs: list[tuple[_Slab, PageRun]] = []
        is_complete = True
        for place in places:
            slab = self._slab_at(shape, place.slab)
            run = PageRun(place.block, 1)
            is_complete = slab is not None and slab.blocks.allocate_at(run)
            if slab is None or not is_complete:
                break
            runs.append((slab, run))
        shape.num_used += len(runs)
        if shape.slabs:
            self._shapes[block_bytes] = shape
        extents = _joined(self._extent(slab, run, block_bytes) for slab, run in runs)
        allocation = Allocation(block_bytes, len(runs), extents, tuple(runs))
        self._live.add(allocation)
        if is_complete:
            return allocation
        self.free(allocation)
        for slab in [slab for slab in shape.slabs if slab.blocks.num_free == slab.blocks.num_pages]:
            self._reclaim(shape, slab)
        return None

    def free(self, allocation: Allocation) -> None:
        """Free blocks; slabs without a used block are reclaimed at once.

        Raises ValueError: the blocks are free already, or belong to another allocator.
        """
        if allocation not in self._live:
            size, count = allocation.block_bytes, allocation.num_blocks
            raise ValueError(f"double free of {count} KV blocks of {size} bytes each")
        self._live.remove(allocation)
        for slab, run in allocation._runs:
            shape = self._shapes[allocation.block_bytes]
            shape.num_used -= run.num_pages
            slab.blocks.free([run])
            if slab.blocks.num_free == slab.blocks.num_pages:
                self._reclaim(shape, slab)

    def check_integrity(self) -> None:
        """Raise AssertionError when slabs overlap, are empty, or disagree with the allocations."""
        self._base.check_integrity()
        used: Counter[_Slab] = Counter()
        for allocation in self._live:
            assert sum(run.num_pages for _, run in allocation._runs) == allocation.num_blocks
            for slab, run in allocation._runs:
                assert slab in self._shapes[allocation.block_bytes].slabs, "a slab was lost"
                used[slab] += run.num_pages
        taken: list[int] = []
        for shape in self._shapes.values():
            assert shape.slabs, "a shape without slabs"
            assert shape.num_used == sum(used[slab] for slab in shape.slabs)
            for slab in shape.slabs:
                slab.blocks.check_integrity()
                assert used[slab] == slab.blocks.num_pages - slab.blocks.num_free > 0
                taken += range(slab.base.first, slab.base.end)
        assert len(set(taken)) == len(taken), "slabs overlap"
        assert len(taken) + self._base.num_free == self._base.num_pages

    def _shape(self, block_bytes: int) -> _Shape:
        """Return a known or a new shape; the caller stores a new shape."""
        if block_bytes in self._shapes:
            return self._shapes[block_bytes]
        return _Shape(slab_layout(block_bytes, self.slab_bytes, self._base.num_pages))

    def _take(self, shape: _Shape, num_blocks: int) -> list[tuple[_Slab, PageRun]]:
        """Allocate blocks of a shape that has, or can get, enough free blocks."""
        runs: list[tuple[_Slab, PageRun]] = []
        missing = num_blocks
        for slab in shape.fullest_first():
            if not missing:
                break
            count = min(missing, slab.blocks.num_free)
            runs += [(slab, run) for run in slab.blocks.allocate(count)]
            missing -= count
        num_new = -(-missing // shape.layout.num_blocks) if missing else 0
        for slab in self._new_slabs(shape, num_new):
            count = min(missing, shape.layout.num_blocks)
            runs += [(slab, run) for run in slab.blocks.allocate(count)]
            missing -= count
        shape.num_used += num_blocks
        return runs

    def _new_slabs(self, shape: _Shape, num_slabs: int) -> list[_Slab]:
        """Return new slabs, adjacent if possible: contiguous blocks are copied by one call."""
        length = shape.layout.num_base_slabs
        together = num_slabs > 1 and self._base.allocate_run(num_slabs * length)
        if together:
            bases = [
                PageRun(first, length) for first in range(together.first, together.end, length)
            ]
        else:
            runs = [self._base.allocate_run(length) for _ in range(num_slabs)]
            bases = [run for run in runs if run is not None]
        assert len(bases) == num_slabs, "num_free_blocks counted too many base slabs"
        slabs = [_Slab(base, PagePool(shape.layout.num_blocks)) for base in bases]
        shape.slabs.update(slabs)
        return slabs

    def _slab_at(self, shape: _Shape, first: int) -> _Slab | None:
        """Return the shape's slab at a base slab, which is taken if it is free; else None."""
        slab = next((slab for slab in shape.slabs if slab.base.first == first), None)
        if slab is None:
            base = PageRun(first, shape.layout.num_base_slabs)
            if not shape.layout.num_blocks or not self._base.allocate_at(base):
                return None
            slab = _Slab(base, PagePool(shape.layout.num_blocks))
            shape.slabs.add(slab)
        return slab

    def _reclaim(self, shape: _Shape, slab: _Slab) -> None:
        shape.slabs.remove(slab)
        self._base.free([slab.base])
        if not shape.slabs:
            del self._shapes[shape.layout.block_bytes]

    def _extent(self, slab: _Slab, run: PageRun, block_bytes: int) -> Extent:
        offset = slab.base.first * self.slab_bytes + run.first * block_bytes
        return Extent(offset, run.num_pages * block_bytes)


def _joined(extents: Iterable[Extent]) -> tuple[Extent, ...]:
    joined: list[Extent] = []
    for extent in extents:
        if joined and sum(joined[-1]) == extent.offset:
            joined[-1] = Extent(joined[-1].offset, joined[-1].num_bytes + extent.num_bytes)
        else:
            joined.append(extent)
    return tuple(joined)
