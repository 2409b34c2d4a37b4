"""The places where a worker keeps and finds KV of ended requests beside the device.

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
from pathlib import Path
from typing import Any, NamedTuple

from gpupoold.files import filesystem_of, is_shared
from gpupoold.memory.host import CacheBytes, CacheShape, KvHostCache, PrefixTable, owners_of
from gpupoold.memory.kv_extents import KvRow
from gpupoold.memory.prefix_files import PrefixFiles, PrefixWriter
from gpupoold.memory.prefix_store import PrefixStore, StoredBlocks
from gpupoold.memory.slabs import BlockPlace

_logger = logging.getLogger(__name__)


class _PeerBlock(NamedTuple):
    number: int  # of the record
    version: int
    place: BlockPlace
    num_bytes: int


class PeerPrefixes:
    """Another worker's prefixes, read without that worker's help; for one thread but ``copy``.

    The other worker may evict a block at any time, also during a copy. A copy is valid if the
    record has the same version after the copy as before.
    """

    tier = "peer"

    def __init__(self, fd: int, shape: CacheShape) -> None:
        """Map the cache behind ``fd``, which stays the caller's.

        Raises:
            OSError: the process has too few addresses.
            ValueError: the cache has other sizes than ``shape``.
        """
        self._table = PrefixTable(fd, shape)
        try:
            self._bytes = CacheBytes(fd, shape)
        except OSError:
            self._table.close()
            raise
        self._num_seen = 0
        self._unfinished: set[int] = set()  # records whose bytes had not arrived
        self._keys: dict[int, tuple[bytes, tuple[bytes, ...]]] = {}  # owner and keys by record
        self._blocks: dict[tuple[bytes, bytes], _PeerBlock] = {}  # by owner and key

    def refresh(self, owner: str) -> None:
        """Take note of additions to the other worker's prefixes."""
        added, self._num_seen = self._table.added_since(self._num_seen)
        numbers, self._unfinished = self._unfinished.union(added), set()
        for number in numbers:
            self._forget(number)
            record = self._table.read(number)
            if record is None:
                if not self._table.is_current(number, version=0):
                    self._unfinished.add(number)
                continue
            self._keys[number] = record.owner, record.keys
            for key, place in zip(record.keys, record.places, strict=True):
                block = _PeerBlock(number, record.version, place, record.block_bytes)
                self._blocks[record.owner, key] = block

    def find(self, owner: str, key: bytes) -> _PeerBlock | None:
        """Return the place of a block, None if the other worker does not have the block."""
        block = self._blocks.get((bytes.fromhex(owner), key))
        if block is None or not self._table.is_current(block.number, block.version):
            return None
        return block

    def copy(self, block: _PeerBlock, to: CacheBytes, place: BlockPlace, num_bytes: int) -> bool:
        """Copy a block; return False if the block was evicted meanwhile."""
        if block.num_bytes != num_bytes:
            return False
        to.copy(place, self._bytes, block.place, num_bytes)
        return self._table.is_current(block.number, block.version)

    def close(self) -> None:
        self._table.close()
        self._bytes.close()

    def _forget(self, number: int) -> None:
        owner, keys = self._keys.pop(number, (b"", ()))
        for key in keys:
            block = self._blocks.get((owner, key))
            if block is not None and block.number == number:
                del self._blocks[owner, key]


# Another thread may call ``copy``, one thread only the other methods.
PrefixSource = PrefixFiles | PeerPrefixes


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


class PrefixTiers:
    """The worker's own host memory, the host memory of other workers, and files; for one thread."""

    def __init__(
        self,
        host: KvHostCache,
        budget_bytes: int | None = None,
        folder: Path | None = None,
        files_bytes: int = 0,
    ) -> None:
        """For ``budget_bytes`` see :class:`PrefixStore`; ``folder`` has files if given."""
        self.store = PrefixStore(host, budget_bytes)
        self._shape = host.shape
        self._bytes = CacheBytes(host.fd, host.shape)
        self._sources: dict[object, PrefixSource] = {}
        self._thread = ThreadPoolExecutor(1, "prefixes")
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Becomes readable at the end of a fetch, until ``clear``."""
        self._files: PrefixFiles | None = None
        self._writer: PrefixWriter | None = None
        if folder is None or not files_bytes:
            return
        if is_shared(filesystem := filesystem_of(folder)):
            text = "no KV is kept in %s: other machines may read files on %s"
            _logger.error(text, folder, filesystem)
        else:
            self._files = PrefixFiles(folder, files_bytes, host.shape.num_ranks)
            self._writer = PrefixWriter(self.store, self._bytes, self._files)
            self.add("files", self._files)

    def poll(self) -> None:
        """Begin to write further KV to files; to be called a few times a second."""
        if self._writer is not None:
            self._writer.poll()

    def peer_up(self, device_number: int, fd: int) -> None:
        """Read the host memory of another worker from now on."""
        try:
            self.add(device_number, PeerPrefixes(fd, self._shape))
        except (OSError, ValueError) as error:
            _logger.info("no prefixes of worker %d are read: %s", device_number, error)

    def forget(self, model: str) -> None:
        """Free the KV of a model's ended requests."""
        self.store.forget(owners_of(model))
        if self._files is not None:
            self._files.forget(owners_of(model))

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
        tiers = [source[0].tier if source is not None else "" for source in found]
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
        has_arrived = False
        try:
            has_arrived = all(
                source is not None and source[0].copy(source[1], self._bytes, place, num_bytes)
                for source, place in zip(found, places, strict=True)
            )
        except (OSError, ValueError) as error:
            _logger.warning("KV of an earlier request could not be fetched: %s", error)
        finally:
            copies.note_arrival(has_arrived)
            os.eventfd_write(self.wake_fd, 1)
        return has_arrived
