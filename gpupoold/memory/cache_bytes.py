"""All bytes of a KV host cache, of all ranks, for copies between caches and files."""

from __future__ import annotations

from gpupoold.memory import libc
from gpupoold.memory.prefix_table import CacheShape
from gpupoold.memory.slabs import BlockPlace


class CacheBytes:
    """The mapped bytes of a cache; the kernel allocates memory only where something is written."""

    def __init__(self, fd: int, shape: CacheShape) -> None:
        """Map the bytes of ``fd``, which stays the caller's.

        Raises:
            OSError: the process has too few addresses.
        """
        self.shape = shape
        flags = libc.MAP_SHARED | libc.MAP_NORESERVE
        self._address = libc.mmap(None, shape.data_bytes, libc.PROT_READ_WRITE, flags, fd, 0)

    def copy(
        self, place: BlockPlace, source: CacheBytes, source_place: BlockPlace, num_bytes: int
    ) -> None:
        """Copy a block of ``num_bytes`` on each rank from another cache of the same shape."""
        parts = zip(
            self._addresses(place, num_bytes),
            source._addresses(source_place, num_bytes),
            strict=True,
        )
        for target, address in parts:
            libc.memcpy(target, address, num_bytes)

    def views(self, place: BlockPlace, num_bytes: int) -> list[memoryview]:
        """Return the bytes of a block on each rank, to be read and written."""
        return [libc.view(address, num_bytes) for address in self._addresses(place, num_bytes)]

    def close(self) -> None:
        libc.munmap(self._address, self.shape.data_bytes)

    def _addresses(self, place: BlockPlace, num_bytes: int) -> list[int]:
        shape = self.shape
        offset = place.slab * shape.slab_bytes + place.block * num_bytes
        if not 0 <= offset <= shape.budget_bytes - num_bytes:
            raise ValueError(f"{place} is outside of the KV host cache")
        return [
            self._address + rank * shape.budget_bytes + offset for rank in range(shape.num_ranks)
        ]
