"""Where the admin socket lies; the daemon and its clients follow the same rule."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gpupoold.errors import Refused

SOCKET_FILE_NAME = "admin.sock"
SYSTEM_RUNTIME_DIR = Path("/run/gpupool")


def default_socket_path(
    environ: Mapping[str, str] | None = None,
    system_dir: Path = SYSTEM_RUNTIME_DIR,
) -> Path:
    """The admin socket when nobody names one; the first of these rules that applies.

    1. ``$GPUPOOL_RUNTIME_DIR/admin.sock`` if that variable is set;
    2. ``/run/gpupool/admin.sock`` if it exists and can be reached;
    3. ``$XDG_RUNTIME_DIR/gpupool/admin.sock`` if that variable is set;
    4. ``/tmp/gpupool-<uid>/admin.sock``.

    Args:
        environ: the environment to read, the process's own if None.
        system_dir: the folder of rule 2.
    """
    env = os.environ if environ is None else environ
    if runtime_dir := env.get("GPUPOOL_RUNTIME_DIR"):
        return Path(runtime_dir) / SOCKET_FILE_NAME
    system_socket = system_dir / SOCKET_FILE_NAME
    # os.path.exists, because Path.exists raises where the folder may not be searched.
    if os.path.exists(system_socket):
        return system_socket
    if session_dir := env.get("XDG_RUNTIME_DIR"):
        return Path(session_dir) / "gpupool" / SOCKET_FILE_NAME
    return Path(f"/tmp/gpupool-{os.getuid()}") / SOCKET_FILE_NAME


def trusted_socket_path() -> Path:
    """The admin socket when nobody names one, for a client.

    Raises:
        Refused: it lies in a folder like /tmp, where another user has put one of their own.
    """
    path = default_socket_path()
    folder = path.parent
    if _is_writable_by_all(folder.parent) and os.path.lexists(folder):
        check_runtime_dir(folder)
    return path


def check_runtime_dir(folder: Path) -> None:
    """See that nobody but this user, and root, can put a socket into the folder.

    Raises:
        Refused: it is another's, others may write to it, or it is no folder; the hint says
            what to do.
        OSError: it cannot be looked at.
    """
    found = os.lstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    hint = "remove it, or set paths.runtime_dir or GPUPOOL_RUNTIME_DIR to a folder of your own"
    if stat.S_ISLNK(found.st_mode):
        problem, hint = "is a symbolic link", f"name the folder itself, or {hint}"
    elif not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid not in (0, os.geteuid()):
        problem = f"belongs to the user with the number {found.st_uid}, not to {os.geteuid()}"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem, hint = f"can be written to by others (mode {mode:04o})", f"chmod go-w {folder}"
    else:
        return
    raise Refused(f"the folder of the admin socket, {folder}, {problem}", hint)


def _is_writable_by_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
