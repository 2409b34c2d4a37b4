"""Files of other users: which are opened, and how much is read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpupoold import files
from gpupoold.files import UnfitFile, opened, read_bounded
from tests.conftest import ROOT

# Permissions do not bind root, so that root becomes another user first.
AS_SOMEBODY = """
import json, os, sys
from pathlib import Path
from gpupoold.checkpoints.check import list_folder
from gpupoold.checkpoints.resolve import resolve
from gpupoold.errors import Refused
from gpupoold.files import hint_to_read, hint_to_write
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid(4000000)
    os.setuid(4000000)
path = Path(sys.argv[1])
said = {"read": hint_to_read(path), "write": hint_to_write(path), "user": os.geteuid()}
steps = {"resolve": lambda: resolve("m", str(path), ()), "list": lambda: list_folder(path)}
for name, step in steps.items():
    try:
        step()
    except Refused as error:
        said[name] = [error.message, error.hint]
print(json.dumps(said))
"""


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        os.chdir(path.parent)  # the length of a socket's path is limited
        sock.bind(path.name)


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (make_fifo, "a named pipe"),
        (make_socket, "a socket"),
        (make_link_to_device, "a device"),
        (Path.mkdir, "a folder"),
    ],
)
def test_other_kinds_are_not_opened(
    make: Callable[[Path], None], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make(tmp_path / "file")
    with pytest.raises(UnfitFile, match=f"is {kind}, not a regular file"):
        read_bounded(tmp_path / "file", 10)


def test_a_pipe_that_replaces_the_file_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    regular = os.stat(__file__)
    os.mkfifo(tmp_path / "file")
    monkeypatch.setattr(os, "stat", lambda _: regular)  # as it was a moment before
    with pytest.raises(UnfitFile, match="is a named pipe"), opened(tmp_path / "file"):
        pass


def test_a_bound_is_not_exceeded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 10)
    assert read_bounded(tmp_path / "file", 10) == b"x" * 10
    with pytest.raises(UnfitFile, match="larger than the allowed 9 B"):
        read_bounded(tmp_path / "file", 9)


def test_links_are_followed_and_missing_files_are_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"content")
    (tmp_path / "link").symlink_to("file")
    assert read_bounded(tmp_path / "link", 10) == b"content"
    with pytest.raises(FileNotFoundError):
        read_bounded(tmp_path / "none", 10)


def test_the_kernels_files_are_empty() -> None:
    assert read_bounded(Path("/proc/self/environ"), 1 << 20) == b""


def ask(path: Path) -> dict[str, list[str] | str]:
    command = [sys.executable, "-c", AS_SOMEBODY, str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    said: dict[str, list[str] | str] = json.loads(done.stdout)
    return said


@pytest.fixture
def home() -> Iterator[Path]:
    """A home folder with a model, in a folder that is open to all."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        home = Path(name) / "ada"
        (home / "models" / "qwen").mkdir(parents=True)
        (home / "models" / "qwen" / "config.json").write_text("{}")
        yield home
        home.chmod(0o755)


def test_a_home_that_is_closed_to_others(home: Path) -> None:
    """As on Ubuntu; the path was said not to exist."""
    home.chmod(0o700 if os.geteuid() == 0 else 0o600)
    said = ask(home / "models" / "qwen")
    hint = said["read"]
    assert f"let the daemon's user enter {home}: setfacl -m u:" in hint
    assert str(hint).endswith(f":x {home}")
    assert said["resolve"] == [
        f"{home}/models/qwen: the daemon's user may not read this folder",
        hint,
    ]


def test_a_model_that_is_closed_to_others(home: Path) -> None:
    model = home / "models" / "qwen"
    model.chmod(0o700 if os.geteuid() == 0 else 0)
    said = ask(model)
    assert str(said["read"]).endswith(f":rX {model}")
    assert "Permission denied" in said["list"][0]
    assert said["list"][1] == said["read"]
    model.chmod(0o755)
    assert "resolve" not in ask(model)


def test_what_can_be_read_needs_nothing(home: Path) -> None:
    said = ask(home / "models" / "qwen")
    assert said["read"] == ""
    assert "resolve" not in said
    assert ask(home / "gone")["resolve"] == [f"{home}/gone does not exist", "check the path"]


def test_a_folder_of_another_user(home: Path) -> None:
    home.chmod(0o555)
    missing = home / "downloads"
    said = ask(missing)
    assert f"mkdir -p {missing} && chown " in said["write"]
    assert files.hint_to_write(home) == "" or os.geteuid() != 0


@pytest.mark.parametrize(
    ("variables", "hint"),
    [
        # As ProtectSystem=strict does: read-only for the service, and writable outside.
        ({"INVOCATION_ID": "0123"}, ("`systemctl edit gpupoold`", "ReadWritePaths={}/new")),
        ({"INVOCATION_ID": ""}, ("mounted read-only",)),
    ],
)
def test_a_disk_that_cannot_be_written(
    tmp_path: Path, variables: dict[str, str], hint: tuple[str, ...]
) -> None:
    script = (
        f"mount --bind {tmp_path} {tmp_path} && mount -o remount,ro,bind {tmp_path} || exit 77; "
        f'exec {sys.executable} -c "$0" {tmp_path}/new'
    )
    code = "import sys; from pathlib import Path; from gpupoold.files import hint_to_write; "
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, f"{code}print(hint_to_write(Path(sys.argv[1])))"],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode in (1, 77) and "gpupoold" not in done.stderr:
        pytest.skip(f"needs mounts in a namespace of its own: {done.stderr}")
    for part in hint:
        assert part.format(tmp_path) in done.stdout, done.stderr
