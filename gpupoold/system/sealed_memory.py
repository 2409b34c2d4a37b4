"""Shared memory of a fixed size behind a descriptor. Standard library only."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create_sealed_memfd(
    name: str, num_bytes: int, populate: Callable[[int, int], None] | None = None
) -> int:
    """Create a zeroed memfd with all pages allocated; children do not inherit the descriptor.

    The size is sealed, so no mapping can lose pages. ``populate`` may allocate the pages of a
    descriptor and a number of bytes before the kernel does.

    Raises:
        OSError: no descriptor or memory is left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        if populate is not None:
            os.ftruncate(fd, num_bytes)
            populate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
