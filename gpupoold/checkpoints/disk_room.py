"""Disk space for downloads, of which several may fill the same disk at the same time."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from gpupoold.errors import Refused
from gpupoold.units import format_bytes

# Left free for the daemon's database and logs, which may be on the same disk.
KEPT_FREE_BYTES = 256 << 20

_lock = threading.Lock()
_promised: dict[object, tuple[int, Callable[[], int]]] = {}
"""The file system and the missing bytes of each download in progress."""


@contextmanager
def disk_room(
    repo_id: str, folder: Path, total_bytes: int, missing_bytes: Callable[[], int]
) -> Iterator[None]:
    """Keep space for a download of ``total_bytes`` to ``folder`` inside the context.

    ``missing_bytes()`` of the download are not in the folder yet.

    Raises:
        Refused: the free space, without that of other downloads, is too small.
        OSError: the folder cannot be examined.
    """
    token, disk = object(), folder.stat().st_dev
    with _lock:
        others = sum(missing() for other, missing in _promised.values() if other == disk)
        free_bytes, wanted_bytes = shutil.disk_usage(folder).free, missing_bytes()
        short_bytes = wanted_bytes + others + KEPT_FREE_BYTES - free_bytes
        if wanted_bytes and short_bytes > 0:
            for_others = f" {format_bytes(others)} are for other downloads," if others else ""
            raise Refused(
                f"{repo_id} has {format_bytes(total_bytes)}, of which {format_bytes(wanted_bytes)} "
                f"is missing; {format_bytes(free_bytes)} is free at {folder},{for_others} and "
                f"{format_bytes(KEPT_FREE_BYTES)} must stay free",
                f"free {format_bytes(short_bytes)}, or set paths.download_dir to a larger disk",
            )
        _promised[token] = disk, missing_bytes
    try:
        yield
    finally:
        with _lock:
            del _promised[token]
