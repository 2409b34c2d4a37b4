"""The rule that says where the admin socket lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from gpupoold.admin.paths import default_socket_path

ALL = {"GPUPOOL_RUNTIME_DIR": "/srv/run", "XDG_RUNTIME_DIR": "/run/user/7"}
SESSION = {"XDG_RUNTIME_DIR": "/run/user/7"}


def test_the_variable_comes_first(tmp_path: Path) -> None:
    (tmp_path / "admin.sock").touch()
    assert default_socket_path(ALL, tmp_path) == Path("/srv/run/admin.sock")


def test_then_the_system_daemon_if_there_is_one(tmp_path: Path) -> None:
    (tmp_path / "admin.sock").touch()
    assert default_socket_path(SESSION, tmp_path) == tmp_path / "admin.sock"


def test_then_the_session(tmp_path: Path) -> None:
    assert default_socket_path(SESSION, tmp_path) == Path("/run/user/7/gpupool/admin.sock")


def test_then_a_folder_of_the_user(tmp_path: Path) -> None:
    empty = {"GPUPOOL_RUNTIME_DIR": "", "XDG_RUNTIME_DIR": ""}
    expected = Path(f"/tmp/gpupool-{os.getuid()}/admin.sock")
    assert default_socket_path({}, tmp_path) == expected
    assert default_socket_path(empty, tmp_path) == expected


def test_it_needs_the_standard_library_only() -> None:
    root = Path(__file__).resolve().parents[3]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from gpupoold.admin.paths import default_socket_path; default_socket_path()"
    )
    # -S and -I leave site-packages out.
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], check=True, timeout=20)
