"""Shared memory with allocated pages."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from gpupoold.system.control_group import memory_room_bytes
from gpupoold.system.sealed_memory import create_sealed_memfd
from gpupoold.units import format_bytes

_MEMINFO = Path("/proc/meminfo")


def create_memfd(
    name: str, num_bytes: int, populate: Callable[[int, int], None] | None = None
) -> int:
    """Return a descriptor of a new zeroed memfd with all pages; children do not inherit it.

    The size is sealed, so no mapping can lose pages. For ``populate`` see
    :func:`~gpupoold.system.sealed_memory.create_sealed_memfd`.

    Raises:
        OSError: the machine or the control group has too little free memory.
    """
    # The kernel would allocate pages beyond the available memory until its OOM killer ends a
    # process.
    free_bytes = available_bytes()
    if num_bytes > free_bytes:
        text = f"{name} needs {format_bytes(num_bytes)}, {format_bytes(free_bytes)} is available"
        raise OSError(errno.ENOMEM, f"{os.strerror(errno.ENOMEM)}: {text}")
    return create_sealed_memfd(name, num_bytes, populate)


def available_bytes() -> int:
    """Return the memory available without swapping, by the kernel's estimate.

    A limit of the control group counts, as of a container or of ``MemoryMax=``.
    """
    fields = dict(line.split(":") for line in _MEMINFO.read_text().splitlines())
    if "MemAvailable" not in fields:
        raise OSError(errno.ENOENT, f"no MemAvailable in {_MEMINFO}")
    free = int(fields["MemAvailable"].split()[0]) << 10
    room = memory_room_bytes()
    return free if room is None else min(free, room)
