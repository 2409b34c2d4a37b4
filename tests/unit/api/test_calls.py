"""A socket that may not be opened: the hint names the command that helps."""

from __future__ import annotations

import errno
import grp
import os
from pathlib import Path

import httpx
import pytest

from gpupoold.api.client import AdminClient
from gpupoold.api.schemas_models import AddPresetRequest
from gpupoold.errors import Refused

OTHER = next(one for one in grp.getgrall() if one.gr_gid not in {0, os.getgid(), *os.getgroups()})


def hint_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    def send(*_: object, **__: object) -> httpx.Response:
        raise httpx.ConnectError("no") from PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(httpx.Client, "send", send)
    with AdminClient(path) as client, pytest.raises(Refused, match="no permission") as caught:
        client.status()
    assert caught.value.exit_code == 5
    return caught.value.hint


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files to groups")
def test_group_of_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "admin.sock"
    path.touch(mode=0o660)
    os.chown(path, -1, OTHER.gr_gid)
    path.chmod(0o660)
    assert f"usermod -aG {OTHER.gr_name} NAME" in hint_for(path, monkeypatch)
    path.chmod(0o600)
    assert hint_for(path, monkeypatch) == "run as the daemon's user, or as root"
    os.chown(path, -1, 0)
    path.chmod(0o660)
    assert hint_for(path, monkeypatch) == "run as the daemon's user, or as root"


def test_socket_out_of_sight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hint_for(tmp_path / "none.sock", monkeypatch) == "run as the daemon's user"


@pytest.mark.parametrize("value", ["\ud800", {"a": ["\udc80"]}])
def test_a_value_that_cannot_be_sent(value: object, tmp_path: Path) -> None:
    request = AddPresetRequest(name="p", base="m", defaults={"stop": value})
    with AdminClient(tmp_path / "none.sock") as client, pytest.raises(Refused, match="sent"):
        client.add_preset(request)
