"""Pages for the blocks that the next steps of a running model take."""

from __future__ import annotations

from bisect import bisect_right

from gpupoold.memory.geometry import KvGeometry
from gpupoold.memory.kv import KvMemory
from gpupoold.memory.kv_extents import Place
from gpupoold.worker.kv.page_eviction import PageEviction, PooledModel

# Bytes of KV mapped in a step before they are needed: later steps need not look for blocks.
_AHEAD_BYTES = 4 << 20


class KvBacking:
    """Maps KV extents; evicts other models only for what the next step may need."""

    def __init__(self, eviction: PageEviction) -> None:
        self._eviction = eviction
        self._pool = eviction.pool

    def ensure(self, model: PooledModel, *, may_map_ahead: bool) -> None:
        """Map as many blocks as the next step may need, or as many as possible.

        With ``may_map_ahead``, also maps a few extents for later steps while pages are free.
        Without pages for more, prefixes of waiting requests give way to running requests.
        """
        missing, soon = model.num_missing_blocks()
        if not missing and not soon:
            return
        kv = model.kv
        # Offloaded KV comes back first: running requests could otherwise keep it out for ever.
        reserved = kv.num_returning_pages
        count = -(-missing // kv.geometry.blocks_per_extent)
        if missing and self._eviction.is_exhausted({model.name}):
            count = min(count, self._pool.num_free)  # an extent takes a page or more
            if not count:
                _make_way(model)
                return
        num_ahead = _num_ahead(kv.geometry, soon) if may_map_ahead else 0
        unmapped = kv.first_extents(Place.UNMAPPED, count + num_ahead)
        wanted = kv.num_missing_pages(unmapped[:count]) + reserved
        if missing and wanted > self._pool.num_free:
            self._eviction.try_to_free(wanted, {model.name})
            unmapped = unmapped[:count]
        if fitting := _fitting(kv, unmapped, self._pool.num_free - reserved):
            kv.map(fitting)
        elif missing:
            _make_way(model)


def _make_way(model: PooledModel) -> None:
    if model.prefixes is not None:
        model.prefixes.drop_if_short()


def _num_ahead(geometry: KvGeometry, num_blocks: int) -> int:
    """Return how many extents to map before ``num_blocks`` are needed: few, as the step waits."""
    wanted = -(-num_blocks // geometry.blocks_per_extent)
    return min(wanted, max(1, _AHEAD_BYTES // geometry.extent_bytes))


def _fitting(kv: KvMemory, extents: list[int], num_pages: int) -> list[int]:
    """Return the first of ``extents`` that ``num_pages`` are enough for."""
    counts = range(1, len(extents) + 1)  # the more extents, the more pages
    return extents[
        : bisect_right(counts, num_pages, key=lambda n: kv.num_missing_pages(extents[:n]))
    ]
