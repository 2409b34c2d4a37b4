"""The path of the admin socket, for the daemon and its clients alike."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from gpupoold.errors import Refused

SOCKET_FILE_NAME = "admin.sock"
# The size of sun_path in unix(7), less its last byte.
MAX_SOCKET_PATH_BYTES = 107
SYSTEM_RUNTIME_DIR = Path("/run/gpupool")


def default_socket_path(
    environ: Mapping[str, str] | None = None, system_dir: Path = SYSTEM_RUNTIME_DIR
) -> Path:
    """Return the default path of the admin socket by the first rule that applies.

    1. ``$GPUPOOL_RUNTIME_DIR/admin.sock`` if that variable is set; 2. ``/run/gpupool/admin.sock``
    if the path exists and can be reached; 3. ``$XDG_RUNTIME_DIR/gpupool/admin.sock`` if that
    variable is set; 4. ``/tmp/gpupool-<uid>/admin.sock``.

    ``environ`` None means the process's own environment; ``system_dir`` is the folder of rule 2.
    """
    env = os.environ if environ is None else environ
    if runtime_dir := env.get("GPUPOOL_RUNTIME_DIR"):
        return Path(runtime_dir) / SOCKET_FILE_NAME
    system_socket = system_dir / SOCKET_FILE_NAME
    # os.path.exists, because Path.exists raises for a folder without search permission.
    if os.path.exists(system_socket):
        return system_socket
    if session_dir := env.get("XDG_RUNTIME_DIR"):
        return Path(session_dir) / "gpupool" / SOCKET_FILE_NAME
    return Path(f"/tmp/gpupool-{os.getuid()}") / SOCKET_FILE_NAME


def trusted_socket_path() -> Path:
    """Return the default path of the admin socket for a client.

    Raises Refused: the folder is like /tmp, and another user owns the socket in the folder.
    """
    path = default_socket_path()
    folder = path.parent
    if _is_writable_by_all(folder.parent) and os.path.lexists(folder):
        check_runtime_dir(folder)
    return path


def check_runtime_dir(folder: Path) -> None:
    """Check that only this user and root can create a socket in the folder.

    Raises:
        Refused: another user owns the folder or may write to the folder, or the path is no folder;
            the hint names a remedy.
        OSError: the folder cannot be examined.
    """
    found = os.lstat(folder)
    mode = stat.S_IMODE(found.st_mode)
    hint = "remove the folder, or set paths.runtime_dir or GPUPOOL_RUNTIME_DIR to your own folder"
    if stat.S_ISLNK(found.st_mode):
        problem, hint = "is a symbolic link", f"name the link's target, or {hint}"
    elif not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid not in (0, os.geteuid()):
        problem = f"belongs to the user with the number {found.st_uid}, not to {os.geteuid()}"
    elif mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem, hint = f"is writable by other users (mode {mode:04o})", f"chmod go-w {folder}"
    else:
        return
    raise Refused(f"the folder of the admin socket, {folder}, {problem}", hint)


def _is_writable_by_all(folder: Path) -> bool:
    try:
        return bool(folder.stat().st_mode & stat.S_IWOTH)
    except OSError:
        return False
