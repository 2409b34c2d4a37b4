"""Where the admin socket lies; the daemon and its clients follow the same rule."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

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
