"""Byte ranges of KV blocks in any of vLLM's layouts. Pure arithmetic.

All KV tensors of a model are views of one buffer. In a *row*, block ``b`` has ``num_bytes`` bytes
at ``offset + b * stride``: one row per layer when layers are outermost, a single row when blocks
are outermost.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from operator import attrgetter

_MIN_BLOCKS_PER_EXTENT = 1
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
        longest = max(-(-self.page_bytes // row.stride) for row in self.rows)
        return max(_MIN_BLOCKS_PER_EXTENT, longest)


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


def as_ranges(numbers: Iterable[int]) -> list[range]:
    """Return ``numbers`` in order as ranges, each of which is mapped, or copied, by one call."""
    ranges: list[range] = []
    start = end = -1
    for number in numbers:
        if number != end:
            if start != end:
                ranges.append(range(start, end))
            start = number
        end = number + 1
    if start != end:
        ranges.append(range(start, end))
    return ranges
