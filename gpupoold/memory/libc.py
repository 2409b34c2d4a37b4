"""The few C library calls the memory code needs, typed; ctypes lives here only."""

from __future__ import annotations

import ctypes
import functools
import os

PROT_NONE = 0
PROT_READ_WRITE = 3
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000

_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
_MAP_FAILED = ctypes.c_void_p(-1).value


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    size, pointer, integer = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    libc.mmap.restype = pointer
    libc.mmap.argtypes = [pointer, size, integer, integer, integer, ctypes.c_long]
    libc.munmap.argtypes = [pointer, size]
    libc.mremap.restype = pointer
    libc.mremap.argtypes = [pointer, size, size, integer, pointer]
    libc.memcpy.argtypes = [pointer, pointer, size]
    libc.memset.argtypes = [pointer, integer, size]
    return libc


def mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    """``mmap(2)``; the GIL is free meanwhile.

    Raises:
        OSError: with the errno of the call.
    """
    result: int | None = _libc().mmap(address, num_bytes, prot, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        errno = ctypes.get_errno()
        raise OSError(errno, f"mmap of {num_bytes} bytes: {os.strerror(errno)}")
    return result


def munmap(address: int, num_bytes: int) -> None:
    """``munmap(2)``."""
    if _libc().munmap(address, num_bytes) != 0:
        errno = ctypes.get_errno()
        raise OSError(errno, f"munmap of {num_bytes} bytes: {os.strerror(errno)}")


def move_pages(source: int, target: int, num_bytes: int) -> None:
    """Move the page-table entries of a shared mapping to ``target``, replacing what is there.

    ``source`` stays a mapping of the same file, with no pages present.

    Raises:
        OSError: with the errno of ``mremap(2)``; ``EINVAL`` before kernel 5.13.
    """
    flags = _MREMAP_MAYMOVE_FIXED_DONTUNMAP
    result: int | None = _libc().mremap(source, num_bytes, num_bytes, flags, target)
    if result != target:
        errno = ctypes.get_errno()
        raise OSError(errno, f"mremap of {num_bytes} bytes: {os.strerror(errno)}")


def memcpy(target: int, source: int, num_bytes: int) -> None:
    """``memcpy(3)``; the GIL is free meanwhile."""
    _libc().memcpy(target, source, num_bytes)


def memset(target: int, value: int, num_bytes: int) -> None:
    """``memset(3)``; the GIL is free meanwhile."""
    _libc().memset(target, value, num_bytes)
