"""Files that another user may have made: opened only if regular, and read up to a bound."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from gpupoold.units import format_bytes

# A named pipe without a writer, and a terminal that becomes the process's own, are not waited for.
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class UnfitFile(OSError):
    """A file that is not regular, or too large; ``strerror`` says what it is."""


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading; links are followed.

    Raises:
        UnfitFile: the path is of another kind.
        OSError: the file is missing or cannot be opened.
    """
    require_regular(path, os.stat(path).st_mode)  # opening some devices has an effect
    descriptor = os.open(path, _FLAGS)
    try:
        require_regular(path, os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    with os.fdopen(descriptor, "rb") as file:
        yield file


def require_regular(path: Path, mode: int) -> None:
    """Check the mode of a file.

    Raises:
        UnfitFile: the mode is that of another kind than a regular file.
    """
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "of another kind")
        raise UnfitFile(errno.EINVAL, f"is {kind}, not a regular file", str(path))


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file.

    A file without a size, as those below ``/proc``, counts as empty.

    Raises:
        UnfitFile: the path is of another kind, or the file is larger than ``max_bytes``.
        OSError: the file is missing or cannot be read.
    """
    with opened(path) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        data = file.read(min(num_bytes, max_bytes) + 1) if num_bytes else b""
    if len(data) > max_bytes:
        raise UnfitFile(
            errno.EFBIG, f"is larger than the allowed {format_bytes(max_bytes)}", str(path)
        )
    return data
