"""Facts about host memory and the kernel's overcommit mode."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from gpupoold.doctor.facts import MemoryFacts


def memory_facts(root: Path = Path("/")) -> MemoryFacts:
    """Return the facts; ``root`` is the folder with ``proc`` and ``sys``."""
    memory = psutil.virtual_memory()
    huge = _meminfo(root, "HugePages_Free") * _meminfo(root, "Hugepagesize") * 1024
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=_cgroup_limit(root),
        huge_bytes=huge,
        overcommit=int(_read(root / "proc/sys/vm/overcommit_memory") or 0),
        transparent_huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
        shared_huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    )


def _read(path: Path) -> str:
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def _meminfo(root: Path, key: str) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    return 0


def _chosen(path: Path) -> str:
    """Return the word in brackets of a list such as ``always [madvise] never``."""
    return _read(path).partition("[")[2].partition("]")[0]


def _cgroup_limit(root: Path) -> int | None:
    """Return the lowest ``memory.max`` of this process's control group and its ancestors."""
    line = _read(root / "proc/self/cgroup").splitlines()[-1:]
    group = line[0].partition("::")[2] if line else ""
    top = root / "sys/fs/cgroup"
    folder = top / group.lstrip("/")
    limits = []
    for one in (folder, *folder.parents):
        text = _read(one / "memory.max")
        if text.isdecimal():
            limits.append(int(text))
        if one == top:
            break
    return min(limits, default=None)
