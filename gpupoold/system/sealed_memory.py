"""Memory behind a descriptor, whose size is fixed. Standard library only."""

from __future__ import annotations

import fcntl
import os

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


def create_sealed_memfd(name: str, num_bytes: int) -> int:
    """Create a zeroed memfd that has all its pages; children do not inherit the descriptor.

    Its size cannot be changed: nobody who has it mapped loses pages.

    Raises:
        OSError: there is no descriptor or no memory left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
