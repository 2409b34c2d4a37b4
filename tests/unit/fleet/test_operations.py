"""Tests of ``fleet/operations.py`` and ``fleet/cluster.py``, as far as they need no Ray."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpupoold.errors import Failed, Refused
from gpupoold.fleet import cluster, operations
from gpupoold.fleet.cluster import NodeMembership

MEMBERSHIP = NodeMembership(
    name="east", ip="10.0.0.1", ray_address="10.0.0.1:6379", is_head=True, owns_ray=True
)


@pytest.mark.parametrize(
    ("http_url", "ip", "url"),
    [
        ("http://0.0.0.0:8000", "10.0.0.2", "http://10.0.0.2:8000"),
        ("https://10.0.0.2:8000", "10.0.0.2", "https://10.0.0.2:8000"),
        ("http://127.0.0.1:8000", "127.0.0.3", "http://127.0.0.1:8000"),
    ],
)
def test_where_a_daemon_is_reached(http_url: str, ip: str, url: str) -> None:
    assert operations._reachable(http_url, ip) == url


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_daemon_on_the_loopback_address_is_refused(host: str) -> None:
    with pytest.raises(Refused, match="cannot reach"):
        operations._reachable(f"http://{host}:8000", "10.0.0.2")


def test_the_membership_is_stored(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="in no fleet"):
        cluster.read_membership(tmp_path)
    cluster.write_membership(tmp_path, MEMBERSHIP)
    assert cluster.read_membership(tmp_path) == MEMBERSHIP
    with pytest.raises(Refused, match=r"at 10\.0\.0\.1:6379 as east"):
        operations._check_free(tmp_path)
    cluster.write_membership(tmp_path, None)
    operations._check_free(tmp_path)
    (tmp_path / cluster.NODE_FILE).write_text("{")
    with pytest.raises(Failed, match="cannot be read"):
        cluster.read_membership(tmp_path)


def test_an_address_towards_others() -> None:
    assert operations.own_ip("127.0.0.1:6379") == "127.0.0.1"
    assert operations.own_ip()


def test_the_folder_of_ray_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "ray"
    cluster._make_private(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    link = tmp_path / "link"
    link.symlink_to(folder)
    with pytest.raises(Failed, match="another user"):
        cluster._make_private(link)
