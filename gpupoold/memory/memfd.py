"""Shared memory whose pages are really there."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from gpupoold.system.sealed_memory import create_sealed_memfd
from gpupoold.units import format_bytes

_MEMINFO = Path("/proc/meminfo")


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
    return create_sealed_memfd(name, num_bytes)


def available_bytes() -> int:
    """Memory that can be had without swapping, as the kernel estimates it."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(errno.ENOENT, f"no MemAvailable in {_MEMINFO}")
