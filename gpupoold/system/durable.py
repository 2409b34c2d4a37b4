"""Files that survive a power cut. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or the names in a folder, are on the disk.

    Raises:
        OSError: they could not be written, or there is nothing at ``path``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(draft: Path, path: Path) -> None:
    """Give a file that is complete its name, in place of the file that has it.

    After a power cut at any time ``path`` is the old file or the new one, and once this function
    has returned the new one.

    Raises:
        OSError: the draft could not be written to the disk or renamed; it stays.
    """
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)
