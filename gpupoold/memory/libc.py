"""Typed wrappers of the C library calls that the memory code needs."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import platform

PROT_NONE = 0
PROT_READ_WRITE = 3
MAP_SHARED = 0x01
MAP_PRIVATE = 0x02
MAP_FIXED = 0x10
MAP_ANONYMOUS = 0x20
MAP_NORESERVE = 0x4000
MAP_POPULATE = 0x8000

MADV_HUGEPAGE = 14
MADV_POPULATE_WRITE = 23

MPOL_PREFERRED = 1

_MREMAP_MAYMOVE_FIXED_DONTUNMAP = 1 | 2 | 4
# Numbers of system calls without a C library function: (get_mempolicy, set_mempolicy).
_MEMPOLICY_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}
_MAX_NODES = 1024  # the kernel refuses a mask shorter than its possible nodes
_PY_BUF_WRITE = 0x200
_view_from = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from.restype = ctypes.py_object
_view_from.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]
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
    libc.madvise.argtypes = [pointer, size, integer]
    libc.syscall.restype = ctypes.c_long
    libc.memcpy.argtypes = [pointer, pointer, size]
    libc.memset.argtypes = [pointer, integer, size]
    return libc


def mmap(address: int | None, num_bytes: int, prot: int, flags: int, fd: int, offset: int) -> int:
    """Call ``mmap(2)`` without the GIL."""
    result: int | None = _libc().mmap(address, num_bytes, prot, flags, fd, offset)
    if result is None or result == _MAP_FAILED:
        raise _error(f"mmap of {num_bytes} bytes")
    return result


def munmap(address: int, num_bytes: int) -> None:
    if _libc().munmap(address, num_bytes) != 0:
        raise _error(f"munmap of {num_bytes} bytes")


def madvise(address: int, num_bytes: int, advice: int) -> None:
    """Call ``madvise(2)`` without the GIL."""
    if _libc().madvise(address, num_bytes, advice) != 0:
        raise _error(f"madvise of {num_bytes} bytes")


def move_pages(source: int, target: int, num_bytes: int) -> None:
    """Move the page-table entries of a shared mapping to ``target``, replacing its mapping.

    ``source`` stays a mapping of the same file, with no pages present.

    Raises:
        OSError: with the errno of ``mremap(2)``; ``EINVAL`` before kernel 5.13.
    """
    flags = _MREMAP_MAYMOVE_FIXED_DONTUNMAP
    result: int | None = _libc().mremap(source, num_bytes, num_bytes, flags, target)
    if result != target:
        raise _error(f"mremap of {num_bytes} bytes")


def memcpy(target: int, source: int, num_bytes: int) -> None:
    """Call ``memcpy(3)`` without the GIL."""
    _libc().memcpy(target, source, num_bytes)


def view(address: int, num_bytes: int) -> memoryview:
    """Return mapped memory as a writable view, which must not be used after the mapping's end."""
    mapped: memoryview = _view_from(address, num_bytes, _PY_BUF_WRITE)
    return mapped


def memset(target: int, value: int, num_bytes: int) -> None:
    """Call ``memset(3)`` without the GIL."""
    _libc().memset(target, value, num_bytes)


def get_mempolicy() -> tuple[int, int]:
    """Return the result of ``get_mempolicy(2)``: mode with flags, and nodes as a bit mask.

    Raises:
        OSError: with the errno of the call; ``ENOSYS`` on unknown processors.
    """
    mode, nodes = ctypes.c_int(), (ctypes.c_uint8 * (_MAX_NODES // 8))()
    address, flags = ctypes.c_void_p(None), ctypes.c_ulong(0)
    _mempolicy(0, ctypes.byref(mode), nodes, ctypes.c_ulong(_MAX_NODES), address, flags)
    return mode.value, int.from_bytes(nodes, "little")


def set_mempolicy(mode: int, nodes: int) -> None:
    """Set the nodes, a bit mask, for the calling thread's new pages (``set_mempolicy(2)``).

    Raises:
        OSError: with the errno of the call; ``ENOSYS`` on unknown processors.
    """
    mask = ctypes.create_string_buffer(nodes.to_bytes(_MAX_NODES // 8, "little"), _MAX_NODES // 8)
    _mempolicy(1, ctypes.c_long(mode), mask, ctypes.c_ulong(_MAX_NODES))


def _mempolicy(which: int, *arguments: object) -> None:
    name, machine = ("get_mempolicy", "set_mempolicy")[which], platform.machine()
    if machine not in _MEMPOLICY_CALLS:
        raise OSError(errno.ENOSYS, f"{name}: no known system call number on {machine}")
    number = ctypes.c_long(_MEMPOLICY_CALLS[machine][which])
    if _libc().syscall(number, *arguments) != 0:
        raise _error(name)


def _error(call: str) -> OSError:
    code = ctypes.get_errno()
    return OSError(code, f"{call}: {os.strerror(code)}")
