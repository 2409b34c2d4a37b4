"""Folders: their file systems, and remedies for those that this process cannot use."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from pathlib import Path

import psutil

# File systems that other machines may read and write.
_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "afs", "lustre", "gpfs", "glusterfs"}


def filesystem_of(path: Path) -> str:
    """Return the type of the file system of a path, ``unknown`` if it is not known."""
    real = os.path.realpath(path)
    inside = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if os.path.commonpath([partition.mountpoint, real]) == partition.mountpoint
    ]
    # A later mount hides an earlier mount at the same place.
    return max(inside, key=lambda one: len(one.mountpoint)).fstype if inside else "unknown"


def is_shared(filesystem: str) -> bool:
    """Return whether other machines may have access to files on such a file system."""
    return filesystem in _NETWORK or filesystem.startswith("fuse")


def hint_to_write(folder: Path) -> str:
    """Return a remedy if this process cannot write to ``folder``; empty if the process can.

    For a missing folder, its nearest existing parent decides.
    """
    there = next(one for one in (folder, *folder.parents) if os.path.lexists(one))
    if os.access(there, os.W_OK | os.X_OK):
        return ""
    with suppress(OSError):
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            return _hint_for_read_only(folder)
    return f"give the folder to the daemon's user: mkdir -p {folder} && chown {_user()}: {folder}"


def _hint_for_read_only(folder: Path) -> str:
    # systemd sets the variable for the processes of a unit.
    if not os.environ.get("INVOCATION_ID"):
        return f"the file system of {folder} is mounted read-only"
    return (
        f"the service may write to its own folders only. To add this folder: mkdir -p {folder} && "
        f"chown {_user()}: {folder}; `systemctl edit gpupoold` with the lines [Service] and "
        f"ReadWritePaths={folder}; systemctl restart gpupoold"
    )


def hint_to_read(path: Path) -> str:
    """Return a remedy if this process cannot read ``path``; empty if readable or missing.

    The remedy names the first folder on the way that this process cannot enter.
    """
    for folder in reversed(path.absolute().parents):
        if os.path.isdir(folder) and not os.access(folder, os.X_OK):
            return f"let the daemon's user enter {folder}: setfacl -m u:{_user()}:x {folder}"
    needed = os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK
    if os.path.exists(path) and not os.access(path, needed):
        return f"let the daemon's user read {path}: setfacl -R -m u:{_user()}:rX {path}"
    return ""


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
