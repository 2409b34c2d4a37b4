"""Writes the copies of a :class:`PrefixStore` to files, behind the requests."""

from __future__ import annotations

import logging
from concurrent.futures import Future

from gpupoold.memory.cache_bytes import CacheBytes
from gpupoold.memory.prefix_files import PrefixFiles
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks

_logger = logging.getLogger(__name__)

# Copies that are kept from eviction at a time to be written: so many bytes, or this share.
_BATCH_BYTES, _BATCH_SHARE = 256 << 20, 1 / 8


class PrefixWriter:
    """Writes copies in the order of their arrival, each once; for one thread."""

    def __init__(self, store: PrefixStore, cache: CacheBytes, files: PrefixFiles) -> None:
        """``cache`` has the bytes of the store's cache."""
        self._store = store
        self._files = files
        self._bytes = cache
        self._batch_bytes = min(_BATCH_BYTES, int(_BATCH_SHARE * cache.shape.budget_bytes))
        store.keeps_unwritten = True
        self._under_way: list[tuple[Future[None], StoredBlocks]] = []

    def poll(self) -> None:
        """Begin to write further copies if the ones before are written."""
        if any(not written.done() for written, _ in self._under_way):
            return
        for written, copies in self._under_way:
            copies.free()
            if error := written.exception():
                _logger.error("KV of an earlier request is not saved: %r", error)
        self._under_way = [
            (self._files.write(owner, keys, self._bytes, copies.places, num_bytes), copies)
            for owner, keys, num_bytes, copies in self._store.take_unwritten(self._batch_bytes)
        ]

    def close(self) -> None:
        """Finish the files begun."""
        self._files.close()
