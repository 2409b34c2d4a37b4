"""The memory limit of a process's control group, of both versions of control groups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Version 1 shows "no limit" as the largest multiple of a page below 2**63.
_NO_LIMIT_BYTES = 1 << 60


def memory_limit_bytes(pid: int | None = None, root: Path = Path("/")) -> int | None:
    """Return the lowest limit of the process's control group and its ancestors.

    ``pid`` None is this process; ``root`` is the folder with ``proc`` and ``sys``. Returns None
    without a limit. In a container, the groups outside are not visible and their limits unknown.
    """
    limits: list[int] = []
    for line in _read(root / "proc" / str(pid or "self") / "cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        top = root / "sys/fs/cgroup"
        if not controllers:
            limits += _limits(top, group, "memory.max")
        elif "memory" in controllers.split(","):
            limits += _limits(top / "memory", group, "memory.limit_in_bytes")
    return min(limits, default=None)


def _limits(top: Path, group: str, name: str) -> Iterator[int]:
    """Yield the limits of a group and its ancestors up to the mount point ``top``."""
    folder = top / group.lstrip("/")
    for one in (folder, *folder.parents):
        text = _read(one / name)
        if text.isdecimal() and int(text) < _NO_LIMIT_BYTES:
            yield int(text)
        if one == top:
            return


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""
