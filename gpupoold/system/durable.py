"""Files that survive a power failure. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on disk.

    Raises:
        OSError: writing failed, or ``path`` does not exist.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_private(path: Path, text: str) -> None:
    """Write a file that only the owner may read, replacing an existing file as :func:`replace`.

    Raises:
        OSError: writing failed.
    """
    draft = path.with_suffix(".new")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    replace(draft, path)


def replace(draft: Path, path: Path) -> None:
    """Rename a complete file to ``path``, replacing an existing file.

    After a power failure ``path`` is the old or the new file, and the new file once this function
    has returned.

    Raises:
        OSError: the draft could not be written to disk or renamed; the draft stays.
    """
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)
