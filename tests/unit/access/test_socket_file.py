"""The admin socket's file: its group and mode."""

from __future__ import annotations

import asyncio
import grp
import os
import socket
import threading
from pathlib import Path

import pytest

from gpupoold.access.peers import AdminGroups, NameService
from gpupoold.system.listeners import share_socket

OTHER = next(one for one in grp.getgrall() if one.gr_gid not in {os.getgid(), *os.getgroups()})
NONE = "no-such-group"

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to groups")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "admin.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    return path


def share(path: Path, groups: AdminGroups) -> None:
    """Share it with groups whose numbers are known."""
    assert asyncio.run(groups.look_up(20))
    share_socket(path, groups)


@pytest.mark.parametrize(
    ("groups", "group_id", "mode"),
    [
        (AdminGroups(OTHER.gr_name, NONE), OTHER.gr_gid, 0o660),
        (AdminGroups(OTHER.gr_name, OTHER.gr_name), OTHER.gr_gid, 0o666),
        (AdminGroups(NONE, NONE), os.getegid(), 0o660),
    ],
    ids=["group", "readers", "none"],
)
def test_root_shares_it(path: Path, groups: AdminGroups, group_id: int, mode: int) -> None:
    share(path, groups)
    found = path.stat()
    assert (found.st_gid, found.st_mode & 0o777, found.st_uid) == (group_id, mode, 0)


def test_anyone_else_keeps_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    share(path, AdminGroups(OTHER.gr_name, OTHER.gr_name))
    assert path.stat().st_mode & 0o777 == 0o600


def test_user_of_the_admin_group_shares_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    monkeypatch.setattr(os, "getegid", lambda: OTHER.gr_gid)
    share(path, AdminGroups(OTHER.gr_name, NONE))
    assert (path.stat().st_gid, path.stat().st_mode & 0o777) == (OTHER.gr_gid, 0o660)


def test_groups_that_are_not_known_are_not_waited_for(path: Path) -> None:
    never = threading.Event()
    names = NameService(find_group=lambda _: never.wait(60) or None)
    share_socket(path, AdminGroups(OTHER.gr_name, OTHER.gr_name, names))
    never.set()
    found = path.stat()
    assert (found.st_gid, found.st_mode & 0o777) == (os.getegid(), 0o660)
