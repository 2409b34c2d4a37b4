"""Shared memory whose pages are really there."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from gpupoold.units import format_bytes

_MEMINFO = Path("/proc/meminfo")
_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create_memfd(name: str, num_bytes: int) -> int:
    """Descriptor of a new zeroed memfd that has all its pages; children do not inherit it.

    Its size cannot be changed: nobody who has it mapped loses pages.

    Raises:
        OSError: the machine has less memory free than that.
    """
    # Asked for too much, the kernel would hand out pages until it kills somebody.
    free_bytes = available_bytes()
    if num_bytes > free_bytes:
        text = f"{format_bytes(num_bytes)} wanted for {name}, {format_bytes(free_bytes)} available"
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {text}")
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(errno.ENOENT, f"no MemAvailable in {_MEMINFO}")
