"""Callers of the admin socket: who they are, what they may do."""

from __future__ import annotations

import grp
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.access import peers
from gpupoold.access.peers import AdminGroups, NameService, Peer, Right, needed_for, peer_of
from gpupoold.errors import Forbidden

# Groups that every system has, none of them of the user that runs the tests.
OWN_GROUPS = {os.getgid(), *os.getgroups()}
SYSTEM = [one for one in grp.getgrall() if one.gr_gid not in OWN_GROUPS][:2]
ADMINS, READERS = SYSTEM
NOBODY = 65534


async def known(everything: str, read_only: str) -> AdminGroups:
    groups = AdminGroups(everything, read_only)
    assert await groups.look_up(20)
    return groups


def peer(*groups: int, user_id: int = NOBODY) -> Peer:
    return Peer(1, user_id, frozenset(groups))


def test_peer_is_what_the_kernel_says() -> None:
    here, there = socket.socketpair(socket.AF_UNIX)
    with here, there:
        found = peer_of(here)
    assert (found.pid, found.user_id) == (os.getpid(), os.geteuid())
    assert found.group_ids == {os.getegid(), *os.getgroups()}


async def test_nobody_known_may_do_nothing() -> None:
    """As with a socket that is no unix socket."""
    with socket.socket() as tcp:
        groups = await known(ADMINS.gr_name, READERS.gr_name)
        assert groups.right_of(peer_of(tcp)) is Right.NOTHING


IN_MANY_GROUPS = """
import os, socket, sys
os.setgroups(range(5000, 5400))
os.setgid(4999)
with socket.socket(fileno=int(sys.argv[1])) as listening, socket.socket(socket.AF_UNIX) as peer:
    peer.connect(listening.getsockname())
    sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can join groups")
def test_a_peer_in_hundreds_of_groups(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        listening.settimeout(20)
        with subprocess.Popen(
            [sys.executable, "-ISc", IN_MANY_GROUPS, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.PIPE,
        ) as child:
            here, _ = listening.accept()
            with here:
                assert peer_of(here).group_ids == {*range(4999, 5400)}
            assert child.stdin is not None
            child.stdin.close()


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
async def test_rights(caller: Peer, right: Right) -> None:
    groups = await known(ADMINS.gr_name, READERS.gr_name)
    assert groups.right_of(caller) is right


async def test_groups_that_do_not_exist_have_no_members() -> None:
    nobody = await known("no-such-group", "no-other-group")
    assert nobody.right_of(peer(0, 1, 2, 3)) is Right.NOTHING


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("right", list(Right))
async def test_who_may_make_which_call(right: Right, method: str) -> None:
    groups = await known(ADMINS.gr_name, READERS.gr_name)
    member_of = {
        Right.NOTHING: (),
        Right.READ: (READERS.gr_gid,),
        Right.EVERYTHING: (ADMINS.gr_gid,),
    }
    caller, is_reading = peer(*member_of[right]), method in ("GET", "HEAD")
    if right is Right.EVERYTHING or (right is Right.READ and is_reading):
        await groups.check(caller, needed_for(method))
        return
    with pytest.raises(Forbidden) as caught:
        await groups.check(caller, needed_for(method))
    assert f"usermod -aG {ADMINS.gr_name} nobody (full access)" in caught.value.hint
    may_look = f"usermod -aG {READERS.gr_name} nobody (read-only access)"
    assert (may_look in caught.value.hint) == (right is Right.NOTHING)
    assert "groupadd" not in caught.value.hint


async def test_hint_makes_the_group_if_there_is_none() -> None:
    groups = await known("no-such-group", READERS.gr_name)
    with pytest.raises(Forbidden) as caught:
        await groups.check(peer(READERS.gr_gid, user_id=4_000_000), Right.EVERYTHING)
    assert "groupadd --system no-such-group && usermod -aG no-such-group 4000000" in (
        caught.value.hint
    )
    assert "may only read" in caught.value.message


async def test_a_group_that_is_made_later_counts_for_the_next_who_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peers, "_REFUSAL_MAX_AGE_S", 0.0)
    numbers = {"admins": None, "readers": 7}
    groups = AdminGroups("admins", "readers", NameService(find_group=numbers.get))
    assert await groups.look_up(20)
    with pytest.raises(Forbidden):
        await groups.check(peer(8), Right.EVERYTHING)
    numbers["admins"] = 8
    await groups.check(peer(8), Right.EVERYTHING)
