"""Sockets that the daemon makes, and those that it is given."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from gpupoold.access.peers import AdminGroups
from gpupoold.config.sections import ServerSettings
from gpupoold.errors import Failed, Refused
from gpupoold.system.listeners import admin_listener, http_listener

GROUPS = AdminGroups("no-such-group", "no-other-group")


def nothing(name: str) -> None:
    assert name in ("http", "admin")


def test_the_api_listens_where_the_configuration_says() -> None:
    with http_listener(ServerSettings(host="127.0.0.1", port=0), nothing) as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with socket.create_connection((host, port)):
            pass
        with (
            pytest.raises(Failed, match=f"cannot listen on 127.0.0.1:{port}"),
            http_listener(ServerSettings(port=port), nothing),
        ):
            pass


def test_the_socket_that_was_given_counts(caplog: pytest.LogCaptureFixture) -> None:
    given = socket.create_server(("127.0.0.1", 0))
    port = given.getsockname()[1]
    with http_listener(ServerSettings(port=port), lambda _: given) as listener:
        assert listener is given
    assert caplog.text == ""
    given = socket.create_server(("127.0.0.1", 0))
    with http_listener(ServerSettings(port=port), lambda _: given) as listener:
        assert listener is given
    assert f"server.port (127.0.0.1:{port}) are ignored" in caplog.text


def test_the_admin_socket_is_made_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    path.touch()  # as a daemon that was killed leaves one
    with admin_listener(tmp_path, GROUPS, nothing):
        mode = "srw-rw----" if os.geteuid() == 0 else "srw-------"
        assert stat.filemode(path.stat().st_mode) == mode
        with (
            pytest.raises(Refused, match="another daemon answers"),
            admin_listener(tmp_path, GROUPS, nothing),
        ):
            pass
    assert not path.exists()


def test_a_given_admin_socket_keeps_its_file(tmp_path: Path) -> None:
    path = tmp_path / "admin.sock"
    given = socket.socket(socket.AF_UNIX)
    given.bind(str(path))
    given.listen()
    with admin_listener(tmp_path, GROUPS, lambda _: given) as listener:
        assert listener is given
    assert path.exists()


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with (
        pytest.raises(Failed, match="the admin socket cannot be made"),
        admin_listener(tmp_path / "nowhere", GROUPS, nothing),
    ):
        pass
