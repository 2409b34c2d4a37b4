"""Facts about host memory and the kernel's overcommit mode."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import psutil

from gpupoold.doctor.facts import MemoryFacts
from gpupoold.system.control_group import memory_limit_bytes


def memory_facts(root: Path = Path("/"), pid: int | None = None) -> MemoryFacts:
    """Return the facts; ``root`` is the folder with ``proc`` and ``sys``.

    The limit is that of the control group of ``pid``, None for this process.
    """
    memory = psutil.virtual_memory()
    huge = _meminfo(root, "HugePages_Free") * _meminfo(root, "Hugepagesize") * 1024
    return MemoryFacts(
        total_bytes=memory.total,
        available_bytes=memory.available,
        limit_bytes=memory_limit_bytes(pid, root),
        huge_bytes=huge,
        overcommit=int(_read(root / "proc/sys/vm/overcommit_memory") or 0),
        transparent_huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/enabled"),
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
