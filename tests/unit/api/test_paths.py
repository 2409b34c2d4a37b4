"""The rule that says where the admin socket lies."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.api import paths
from gpupoold.api.paths import check_runtime_dir, default_socket_path, trusted_socket_path
from gpupoold.errors import Refused

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
        "from gpupoold.api.paths import default_socket_path; default_socket_path()"
    )
    # -S and -I leave site-packages out.
    subprocess.run([sys.executable, "-I", "-S", "-c", code, str(root)], check=True, timeout=20)


def test_a_folder_of_ones_own(tmp_path: Path) -> None:
    for mode in (0o700, 0o755):
        tmp_path.chmod(mode)
        check_runtime_dir(tmp_path)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_a_folder_that_others_can_write_to(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(Refused, match=f"is writable by other users .mode {mode:04o}") as caught:
        check_runtime_dir(tmp_path)
    assert caught.value.hint == f"chmod go-w {tmp_path}"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    os.chown(tmp_path, 4_000_000, -1)
    with pytest.raises(Refused, match="belongs to the user with the number 4000000") as caught:
        check_runtime_dir(tmp_path)
    assert "GPUPOOL_RUNTIME_DIR" in caught.value.hint


def test_what_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(Refused, match="is a symbolic link"):
        check_runtime_dir(tmp_path / "link")
    with pytest.raises(Refused, match="is not a folder"):
        check_runtime_dir(tmp_path / "file")
    with pytest.raises(FileNotFoundError):
        check_runtime_dir(tmp_path / "nothing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_clients_do_not_trust_a_socket_in_a_folder_of_somebody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared, folder = tmp_path, tmp_path / "gpupool-0"
    monkeypatch.setattr(paths, "default_socket_path", lambda: folder / "admin.sock")
    shared.chmod(0o1777)
    assert trusted_socket_path() == folder / "admin.sock", "there is nothing yet"
    folder.mkdir(mode=0o700)
    assert trusted_socket_path() == folder / "admin.sock"
    os.chown(folder, 4_000_000, -1)
    with pytest.raises(Refused, match="belongs to the user with the number 4000000"):
        trusted_socket_path()
    shared.chmod(0o755)
    assert trusted_socket_path() == folder / "admin.sock", "only its owner makes folders there"
