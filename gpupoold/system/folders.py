"""Remedies for folders that this process cannot enter or write to."""

from __future__ import annotations

import os
import pwd
from contextlib import suppress
from pathlib import Path


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
    if os.path.exists(path) and not os.access(path, _needed_to_read(path)):
        return f"let the daemon's user read {path}: setfacl -R -m u:{_user()}:rX {path}"
    return ""


def _needed_to_read(path: Path) -> int:
    return os.R_OK | os.X_OK if os.path.isdir(path) else os.R_OK


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
