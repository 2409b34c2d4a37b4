"""Look-ups of users and groups that take their time, or fail, hold up nobody."""

from __future__ import annotations

import grp
import os
import pwd
import threading
import time

from gpupoold.access.peers import NameService, group_id, user_name

# Nothing here may take so long, on however busy a machine.
PATIENCE_S = 20.0
ROOT = grp.getgrgid(0).gr_name


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
