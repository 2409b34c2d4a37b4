"""Facts about host memory, the kernel's overcommit mode, limits of processes and folders."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path

import psutil

from gpupoold.config.schema import Settings
from gpupoold.doctor.facts import LimitFacts, MemoryFacts
from gpupoold.domain import Folder
from gpupoold.files import filesystem_of
from gpupoold.system.kernel_memory import memory_limit_bytes, read_text


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
        overcommit=int(read_text(root / "proc/sys/vm/overcommit_memory") or 0),
        shared_huge_pages=_chosen(root / "sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        shared_huge_bytes=_meminfo(root, "ShmemHugePages") * 1024,
    )


def _meminfo(root: Path, key: str) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0])
    return 0


def _chosen(path: Path) -> str:
    """Return the word in brackets of a list such as ``always [madvise] never``."""
    return read_text(path).partition("[")[2].partition("]")[0]


def limit_facts(pid: int | None = None) -> LimitFacts:
    """Return the limits of process ``pid``, the daemon, if readable; else this process's limits."""
    kinds = (
        resource.RLIMIT_NOFILE,
        resource.RLIMIT_NPROC,
        resource.RLIMIT_MEMLOCK,
        resource.RLIMIT_AS,
    )
    if pid is not None:
        with suppress(OSError):
            return LimitFacts("the daemon", *(_soft(resource.prlimit(pid, kind)) for kind in kinds))
    return LimitFacts("this shell", *(_soft(resource.getrlimit(kind)) for kind in kinds))


def _soft(limit: tuple[int, int]) -> int | None:
    return None if limit[0] == resource.RLIM_INFINITY else limit[0]


def folder_facts(settings: Settings) -> tuple[Folder, ...]:
    """Return the facts of the folders that the daemon writes to, as this process finds them."""
    paths = settings.paths
    folders = [
        _folder("state_dir", paths.state_dir),
        _folder("log_dir", paths.log_dir),
        _folder("download_dir", paths.download_dir),
        _folder("runtime_dir", paths.runtime_dir),
    ]
    if settings.memory.snapshot_files_bytes:
        folders.append(_folder("snapshots", paths.state_dir / "snapshots"))
    if settings.memory.kv_files_bytes:
        folders.append(_folder("kv", settings.kv_folder))
    return tuple(folders)


def _folder(key: str, path: Path) -> Folder:
    there = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    free_bytes = num_bytes = 0
    owner = -1
    with suppress(OSError):
        disk = os.statvfs(there)
        free_bytes = disk.f_bavail * disk.f_frsize
        owner = there.stat().st_uid
    if key in ("snapshots", "kv") and there == path:
        with suppress(OSError):
            num_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    is_writable = os.access(there, os.W_OK | os.X_OK)
    filesystem = filesystem_of(there)
    return Folder(key, path, there == path, is_writable, owner, filesystem, free_bytes, num_bytes)
