"""Callers of the admin socket: who they are, what they may do."""

from __future__ import annotations

import grp
import os
import pwd
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpupoold.access import peers
from gpupoold.access.peers import (
    AdminGroups,
    NameService,
    Peer,
    Right,
    group_id,
    needed_for,
    peer_of,
    user_name,
)
from gpupoold.errors import Forbidden

# Groups that every system has, none of them of the user that runs the tests.
OWN_GROUPS = {os.getgid(), *os.getgroups()}
SYSTEM = [one for one in grp.getgrall() if one.gr_gid not in OWN_GROUPS][:2]
ADMINS, READERS = SYSTEM
NOBODY = 65534

# Nothing here may take so long, on however busy a machine.
PATIENCE_S = 20.0
ROOT = grp.getgrgid(0).gr_name


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


async def test_the_systems_tables() -> None:
    names = NameService()
    assert names.group_id(ROOT) is None
    assert names.user_name(os.geteuid()) == str(os.geteuid())
    assert await names.settled(PATIENCE_S)
    assert (names.group_id(ROOT), names.user_name(0)) == (0, pwd.getpwuid(0).pw_name)
    assert (group_id("no-such-group"), user_name(4_000_000)) == (None, "4000000")


async def test_what_was_known_stays_while_it_is_looked_up_anew() -> None:
    slow, found = threading.Event(), [5]

    def find(_: str) -> int:
        if len(found) > 1:
            slow.wait(PATIENCE_S)
        return found[-1]

    names = NameService(find_group=find)
    names.group_id("g")
    assert await names.settled(PATIENCE_S)
    found.append(6)
    started_s = time.monotonic()
    assert [names.group_id("g", 0.0) for _ in range(3)] == [5, 5, 5]
    assert not await names.settled(0.01)
    assert time.monotonic() - started_s < PATIENCE_S / 2, "somebody waited for the look-up"
    slow.set()
    assert await names.settled(PATIENCE_S)
    assert names.group_id("g") == 6


async def test_an_answer_is_kept_for_its_time() -> None:
    asked: list[str] = []

    def find(name: str) -> None:
        asked.append(name)

    names = NameService(find_group=find)
    for _ in range(3):
        assert names.group_id("g") is None
        assert await names.settled(PATIENCE_S)
    assert asked == ["g"]


async def test_a_table_that_cannot_be_asked() -> None:
    broken: list[OSError] = []

    def find(_: str) -> int:
        if broken:
            raise broken[0]
        return 5

    names = NameService(find_group=find)
    names.group_id("g")
    assert await names.settled(PATIENCE_S)
    broken.append(OSError("the server is away"))
    names.group_id("g", 0.0)
    assert await names.settled(PATIENCE_S)
    assert names.group_id("g") == 5


async def test_those_who_wait_do_not_pile_up() -> None:
    """However many unknown users there are while nothing is answered."""
    stuck = threading.Event()

    def find(user_id: int) -> str:
        stuck.wait(PATIENCE_S)
        return f"user {user_id}"

    names = NameService(find_user=find)
    before = threading.active_count()
    for user_id in range(5000):
        assert names.user_name(user_id) == str(user_id)
    assert threading.active_count() == before + 1
    stuck.set()
    assert await names.settled(PATIENCE_S)
    assert names.user_name(0) == "user 0"
    assert names.user_name(4999) == "4999", "it was not kept in mind"
