"""Memory by the kernel's rules: the limits of control groups, and files in memory of a fixed size.

Control groups are of both versions. Standard library only.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Version 1 shows "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 1 << 60

_SEALS = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class _Names:
    """Files of a group, and keys of ``memory.stat`` with all groups below."""

    limit: str
    usage: str
    file_cache: tuple[str, str]


_VERSION_1 = _Names(
    "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_VERSION_2 = _Names("memory.max", "memory.current", ("inactive_file", "active_file"))


def memory_limit_bytes(pid: int | None = None, root: Path = Path("/")) -> int | None:
    """Return the lowest limit of the process's control group and its ancestors.

    ``pid`` None is this process; ``root`` is the folder with ``proc`` and ``sys``. Returns None
    without a limit. In a container, the groups outside are not visible and their limits unknown.
    """
    limits = [limit for _, _, limit in _limited_groups(pid, root)]
    return min(limits, default=None)


def memory_room_bytes(root: Path = Path("/")) -> int | None:
    """Return how much more memory this process may use before a group reaches its limit.

    The kernel drops cached files before a group exceeds its limit; shared memory counts as used.
    Returns None without a limit; ``root`` as for :func:`memory_limit_bytes`.
    """
    rooms = []
    for folder, names, limit in _limited_groups(None, root):
        usage = read_text(folder / names.usage)
        used = int(usage) - _file_cache_bytes(folder, names) if usage.isdecimal() else 0
        rooms.append(max(0, limit - used))
    return min(rooms, default=None)


def _limited_groups(pid: int | None, root: Path) -> Iterator[tuple[Path, _Names, int]]:
    """Yield the groups of a process that have a limit, with the limit in bytes."""
    for line in read_text(root / "proc" / str(pid or "self") / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        top = root / "sys/fs/cgroup"
        if not controllers:
            yield from _limited(top, group, _VERSION_2)
        elif "memory" in controllers.split(","):
            yield from _limited(top / "memory", group, _VERSION_1)


def _limited(top: Path, group: str, names: _Names) -> Iterator[tuple[Path, _Names, int]]:
    """Yield a group and its ancestors, up to the mount point ``top``, that have a limit."""
    folder = top / group.lstrip("/")
    for path in (folder, *folder.parents):
        text = read_text(path / names.limit)
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            yield path, names, int(text)
        if path == top:
            return


def _file_cache_bytes(folder: Path, names: _Names) -> int:
    pairs = [line.split() for line in read_text(folder / "memory.stat").splitlines()]
    values = [int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in names.file_cache]
    return sum(values)


def read_text(path: Path) -> str:
    """Return the text of a small file of the kernel, empty if there is none."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def create_sealed_memfd(
    name: str,
    num_bytes: int,
    populate: Callable[[int, int], None] | None = None,
    *,
    is_allocated: bool = True,
) -> int:
    """Create a zeroed memfd with all pages allocated, which children do not inherit.

    The size is sealed, so no mapping can lose pages. ``populate`` may allocate the pages of a
    descriptor and a number of bytes before the kernel does. If not ``is_allocated``, the kernel
    allocates pages when they are first used.

    Raises OSError: no descriptor or memory is left.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        if populate is not None:
            populate(fd, num_bytes)
        if is_allocated:
            os.posix_fallocate(fd, 0, num_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd
