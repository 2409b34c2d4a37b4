"""Buffers in host memory that processes share, with pages that several threads allocate."""

from __future__ import annotations

import errno
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from gpupoold.memory import libc
from gpupoold.memory.libc import NO_NODE, create_memfd
from gpupoold.system.kernel_memory import create_sealed_memfd

_POPULATED = libc.MAP_SHARED | libc.MAP_POPULATE
# Bytes of a large buffer whose pages one of several threads allocates at a time.
_PIECE_BYTES = 64 << 20
_MAX_THREADS = 8


class HostBuffer:
    """A memfd, or a part of a memfd, mapped into this process."""

    def __init__(
        self, fd: int, num_bytes: int, offset: int = 0, *, is_populated: bool = True
    ) -> None:
        """Map ``num_bytes`` of ``fd`` from ``offset`` on; own ``fd``, which a failure closes.

        If not ``is_populated``, the kernel allocates pages when they are first used.
        """
        self.fd = fd
        self.num_bytes = num_bytes
        self._offset = offset
        flags = _POPULATED if is_populated else libc.MAP_SHARED | libc.MAP_NORESERVE
        try:
            self.address = libc.mmap(None, num_bytes, libc.PROT_READ_WRITE, flags, fd, offset)
        except OSError:
            os.close(fd)
            raise
        self._is_open = True

    @classmethod
    def create(
        cls,
        name: str,
        num_bytes: int,
        nodes: Sequence[int] = (NO_NODE,),
        *,
        is_populated: bool = True,
    ) -> HostBuffer:
        """Create a zeroed buffer: the first of equal parts, each with pages of one of ``nodes``.

        If not ``is_populated``, the kernel allocates pages when they are first used, and the caller
        knows that there will be memory.

        Raises OSError: the machine has too little free memory.
        """
        file_bytes = num_bytes * len(nodes)
        if is_populated:
            fd = create_memfd(name, file_bytes, functools.partial(touch_pages, nodes=nodes))
            return cls(fd, num_bytes)
        prefer = functools.partial(libc.prefer_nodes, nodes=nodes)
        fd = create_sealed_memfd(name, file_bytes, prefer, is_allocated=False)
        return cls(fd, num_bytes, is_populated=False)

    def populate(self) -> None:
        """Allocate and zero the pages that are missing, on several cores.

        Raises OSError: the machine has too little memory.
        """
        _on_cores(self.num_bytes, self._populate)

    def allocate(self) -> None:
        """Allocate and zero the pages that are missing, without mapping them.

        Raises OSError: the machine has too little memory.
        """
        os.posix_fallocate(self.fd, self._offset, self.num_bytes)

    def _populate(self, offset: int, num_bytes: int) -> None:
        try:
            libc.populate(self.address + offset, num_bytes)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14, which allocates at first use
                raise

    @property
    def file_id(self) -> tuple[int, int]:
        """The numbers by which this machine tells the memfd from others."""
        stat = os.fstat(self.fd)
        return stat.st_dev, stat.st_ino

    def close(self) -> None:
        """Unmap and close; the bytes stay while another process has the memfd open.

        A second call does nothing: the address and the descriptor may have been reused.
        """
        if not self._is_open:
            return
        self._is_open = False
        libc.munmap(self.address, self.num_bytes)
        os.close(self.fd)


def touch_pages(fd: int, num_bytes: int, nodes: Sequence[int]) -> None:
    """Allocate and zero all pages of a memfd, on several cores.

    Each of ``len(nodes)`` equal parts gets pages of one node. Called before pinning: one thread,
    such as the thread of the pinning call, needs at least 0.2 s per GB (2.5 s in a virtual machine
    with untouched memory).

    Raises OSError: the machine has too little memory.
    """
    libc.prefer_nodes(fd, num_bytes, nodes)

    def touch(offset: int, length: int) -> None:
        address = libc.mmap(None, length, libc.PROT_READ_WRITE, libc.MAP_SHARED, fd, offset)
        try:
            libc.populate(address, length)
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel before 5.14
                raise
            libc.munmap(
                libc.mmap(None, length, libc.PROT_READ_WRITE, _POPULATED, fd, offset), length
            )
        finally:
            libc.munmap(address, length)

    _on_cores(num_bytes, touch)


def _on_cores(num_bytes: int, touch: Callable[[int, int], None]) -> None:
    """Call ``touch`` with the offset and the bytes of each piece, on several cores."""
    offsets = range(0, num_bytes, _PIECE_BYTES)
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "touch") as threads:
        lengths = (min(_PIECE_BYTES, num_bytes - offset) for offset in offsets)
        for _ in threads.map(touch, offsets, lengths):
            pass
