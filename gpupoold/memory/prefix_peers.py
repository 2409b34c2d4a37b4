"""KV of ended requests in the host memory of the box's other workers."""

from __future__ import annotations

from typing import NamedTuple

from gpupoold.memory.prefix_table import CacheBytes, CacheShape, PrefixTable
from gpupoold.memory.slabs import BlockPlace


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
