"""Files of other users: which are opened, and how much is read."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from gpupoold.files import UnfitFile, opened, read_bounded


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
