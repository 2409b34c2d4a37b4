"""Shared memory of a fixed size behind a descriptor. Standard library only."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create_sealed_memfd(name: str, num_bytes: int) -> int:
    """Create a zeroed memfd with all pages allocated; children do not inherit the descriptor.

    The size is sealed, so no mapping can lose pages.

    Raises:
        OSError: no descriptor or memory is left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
