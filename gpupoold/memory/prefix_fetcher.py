"""Copies of KV from other places of the box to the store of a worker.

A *source* has KV of ended requests that the worker's own store does not have: the host memory of
another worker, or files. A fetch copies blocks to the store in a thread of its own; what has
arrived is in the store like the worker's own blocks.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from gpupoold.memory.geometry import KvRow
from gpupoold.memory.prefix_files import PrefixFiles
from gpupoold.memory.prefix_peers import PeerPrefixes
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks
from gpupoold.memory.prefix_table import CacheBytes
from gpupoold.memory.slabs import BlockPlace

_logger = logging.getLogger(__name__)


PrefixSource = PrefixFiles | PeerPrefixes
"""A source; its ``copy`` may be called by another thread, the other methods by one only."""


@dataclass(frozen=True, eq=False, slots=True)
class Fetch:
    """Blocks on the way to the store; ``tiers`` are the tiers of the blocks."""

    keys: frozenset[bytes]
    tiers: Sequence[str]
    copies: StoredBlocks
    job: Future[bool]

    @property
    def has_ended(self) -> bool:
        return self.job.done()

    def finish(self) -> Counter[str]:
        """Wait for the end; return the bytes that have arrived by tier."""
        has_arrived = self.job.result()
        self.copies.free()
        block_bytes = self.copies.num_bytes // len(self.tiers) if has_arrived else 0
        return Counter({tier: num * block_bytes for tier, num in Counter(self.tiers).items()})


class PrefixFetcher:
    """Finds blocks in ``sources`` and copies them; for one thread."""

    def __init__(self, store: PrefixStore, cache: CacheBytes) -> None:
        """``cache`` has the bytes of the store's cache."""
        self.store = store
        self._bytes = cache
        self._sources: dict[object, PrefixSource] = {}
        self._thread = ThreadPoolExecutor(1, "prefixes")
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable at the end of a fetch, until ``clear``."""

    @property
    def has_sources(self) -> bool:
        return bool(self._sources)

    def add(self, name: object, source: PrefixSource) -> None:
        """Add a source, in place of the source of that name."""
        self.remove(name)
        self._sources[name] = source

    def remove(self, name: object) -> None:
        """Remove a source, if there is one of that name."""
        source = self._sources.pop(name, None)
        if source is not None:
            self._thread.submit(source.close)  # after the copies under way

    def refresh(self, owner: str) -> None:
        """Take note of what the sources have got."""
        for source in self._sources.values():
            source.refresh(owner)

    def has(self, owner: str, key: bytes) -> bool:
        """Return whether a source has a block."""
        return self._find(owner, key) is not None

    def begin(self, owner: str, keys: Sequence[bytes], rows: Sequence[KvRow]) -> Fetch | None:
        """Start to copy blocks of sources to the store, the first ones that have room there.

        Returns None without any.
        """
        room = self.store.begin(owner, keys, rows)
        if room is None:
            return None
        indices, copies = room
        chosen = [keys[index] for index in indices]
        found = [self._find(owner, key) for key in chosen]
        num_bytes = copies.num_bytes // len(chosen)
        job = self._thread.submit(self._run, found, copies, copies.places, num_bytes)
        tiers = [one[0].tier if one is not None else "" for one in found]
        return Fetch(frozenset(chosen), tiers, copies, job)

    def clear(self) -> None:
        """Make ``wake_fd`` unreadable until the next end of a fetch."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.wake_fd)

    def close(self) -> None:
        """Wait for all fetches and free the sources."""
        for name in list(self._sources):
            self.remove(name)
        self._thread.shutdown()
        os.close(self.wake_fd)

    def _find(self, owner: str, key: bytes) -> tuple[PrefixSource, Any] | None:
        for source in self._sources.values():
            found = source.find(owner, key)
            if found is not None:
                return source, found
        return None

    def _run(
        self,
        found: Sequence[tuple[PrefixSource, Any] | None],
        copies: StoredBlocks,
        places: Sequence[BlockPlace],
        num_bytes: int,
    ) -> bool:
        """Copy blocks in the thread; return whether all have arrived."""
        has_arrived = False
        try:
            has_arrived = all(
                one is not None and one[0].copy(one[1], self._bytes, place, num_bytes)
                for one, place in zip(found, places, strict=True)
            )
        except (OSError, ValueError) as error:
            _logger.warning("KV of an earlier request could not be fetched: %s", error)
        finally:
            copies.note_arrival(has_arrived)
            os.eventfd_write(self.wake_fd, 1)
        return has_arrived
