"""Facts about the folders of a configuration."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from gpupoold.config.schema import Settings
from gpupoold.doctor.facts import Folder
from gpupoold.system.folders import filesystem_of


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
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    free_bytes = num_bytes = 0
    owner = -1
    with suppress(OSError):
        disk = os.statvfs(there)
        free_bytes = disk.f_bavail * disk.f_frsize
        owner = there.stat().st_uid
    if key in ("snapshots", "kv") and there == path:
        with suppress(OSError):
            num_bytes = sum(one.stat().st_size for one in path.rglob("*") if one.is_file())
    is_writable = os.access(there, os.W_OK | os.X_OK)
    filesystem = filesystem_of(there)
    return Folder(key, path, there == path, is_writable, owner, filesystem, free_bytes, num_bytes)
