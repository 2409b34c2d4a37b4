"""Callers of the admin socket: who they are, what they may do."""

from __future__ import annotations

import grp
import os
import pwd
import socket

import pytest

from gpupoold.access.peers import AdminGroups, Peer, Right, group_id, peer_of
from gpupoold.errors import Forbidden

# Groups that every system has, none of them of the user that runs the tests.
OWN_GROUPS = {os.getgid(), *os.getgroups()}
SYSTEM = [one for one in grp.getgrall() if one.gr_gid not in OWN_GROUPS][:2]
ADMINS, READERS = SYSTEM
GROUPS = AdminGroups(ADMINS.gr_name, READERS.gr_name)
NOBODY = 65534


def peer(*groups: int, user_id: int = NOBODY) -> Peer:
    return Peer(1, user_id, frozenset(groups))


def test_peer_is_what_the_kernel_says() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        found = peer_of(here)
    assert (found.pid, found.user_id) == (os.getpid(), os.geteuid())
    assert found.group_ids == {os.getegid(), *os.getgroups()}


def test_nobody_known_may_do_nothing() -> None:
    """As with a socket that is no unix socket."""
    with socket.socket() as tcp:
        assert GROUPS.right_of(peer_of(tcp)) is Right.NOTHING


def test_groups_are_looked_up_where_the_kernel_does_not_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpupoold.access.peers._SO_PEERGROUPS", 9999)
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        found = peer_of(here)
    name = pwd.getpwuid(os.geteuid()).pw_name
    assert found.group_ids == {*os.getgrouplist(name, os.getegid())}


@pytest.mark.parametrize(
    ("caller", "right"),
    [
        (peer(user_id=0), Right.EVERYTHING),
        (peer(user_id=os.geteuid()), Right.EVERYTHING),
        (peer(5, ADMINS.gr_gid), Right.EVERYTHING),
        (peer(ADMINS.gr_gid, READERS.gr_gid), Right.EVERYTHING),
        (peer(READERS.gr_gid), Right.READ),
        (peer(), Right.NOTHING),
    ],
    ids=["root", "own", "admin", "both", "reader", "other"],
)
def test_rights(caller: Peer, right: Right) -> None:
    assert GROUPS.right_of(caller) is right


def test_groups_that_do_not_exist_have_no_members() -> None:
    assert group_id("no-such-group") is None
    nobody = AdminGroups("no-such-group", "no-other-group")
    assert nobody.right_of(peer(0, 1, 2, 3)) is Right.NOTHING


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("right", list(Right))
def test_who_may_make_which_call(right: Right, method: str) -> None:
    is_reading = method in ("GET", "HEAD")
    if right is Right.EVERYTHING or (right is Right.READ and is_reading):
        GROUPS.check(peer(), right, method)
        return
    with pytest.raises(Forbidden) as caught:
        GROUPS.check(peer(), right, method)
    group = READERS if is_reading else ADMINS
    assert f"usermod -aG {group.gr_name} nobody" in caught.value.hint
    assert "groupadd" not in caught.value.hint


def test_hint_makes_the_group_if_there_is_none() -> None:
    with pytest.raises(Forbidden) as caught:
        AdminGroups("no-such-group", "x").check(peer(user_id=4_000_000), Right.READ, "POST")
    assert "groupadd --system no-such-group && usermod -aG no-such-group 4000000" in (
        caught.value.hint
    )
    assert "may only look" in caught.value.message
