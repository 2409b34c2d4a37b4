"""Callers of the admin socket and their rights.

The kernel names the caller (``SO_PEERCRED``, ``SO_PEERGROUPS``), so a caller cannot claim to be
another user.
"""

from __future__ import annotations

import asyncio
import ctypes
import enum
import grp
import os
import pwd
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal

from gpupoold.errors import Forbidden

# Linux 4.13; Python has no name for it.
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_GROUP_ID = struct.Struct("I")
_MAX_GROUP_BYTES = 65536 * _GROUP_ID.size  # NGROUPS_MAX

# Age up to which a refusing answer is used, and the time limit of the wait for a newer answer.
_REFUSAL_MAX_AGE_S = 2.0
_LOOK_UP_LIMIT_S = 1.0

# Read-only paths, whose answers contain neither prompts nor keys.
READING_METHODS = frozenset({"GET", "HEAD"})

MAX_AGE_S = 60.0
_MAX_ANSWERS = 1024

_Question = tuple[Literal["group", "user"], Any]
_Answer = int | str | None


class Right(enum.IntEnum):
    """A caller's rights; each right includes the lower rights."""

    NOTHING = 0
    READ = 1
    EVERYTHING = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a unix socket, as of the connection.

    ``group_ids`` has all groups of the process.
    """

    pid: int
    user_id: int
    group_ids: frozenset[int]


def peer_of(connection: socket.socket) -> Peer:
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user_id, main_group_id = _CREDENTIALS.unpack(credentials)
    return Peer(pid, user_id, frozenset((main_group_id, *_other_groups(connection))))


def _other_groups(connection: socket.socket) -> list[int]:
    """Return the supplementary groups of a peer, empty if the kernel does not report groups."""
    # socket.getsockopt() returns at most 1,024 bytes: 256 groups.
    found = ctypes.create_string_buffer(_MAX_GROUP_BYTES)
    length = ctypes.c_uint32(_MAX_GROUP_BYTES)
    status = ctypes.CDLL(None).getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, found, ctypes.byref(length)
    )
    if status != 0:
        return []
    return [number for (number,) in _GROUP_ID.iter_unpack(found.raw[: length.value])]


def group_id(name: str) -> int | None:
    """Return the number of a group, None if no group has this name; blocks."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def user_name(user_id: int) -> str:
    """Return a user's name, or the number as text if no name exists; blocks."""
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return str(user_id)


@dataclass(eq=False)
class NameService:
    """Users and groups by name, looked up on a thread; no method blocks.

    The system's tables may be on the network (SSSD, LDAP, NIS), where a look-up has no time limit.
    Results stay valid while the next look-up runs. ``find_group`` and ``find_user`` may block: a
    daemon thread calls them.
    """

    find_group: Callable[[str], int | None] = group_id
    find_user: Callable[[int], str] = user_name
    # With the time of the answer.
    _answers: dict[_Question, tuple[float, _Answer]] = field(default_factory=dict, init=False)
    _asked: dict[_Question, Future[None]] = field(default_factory=dict, init=False)
    _questions: queue.SimpleQueue[_Question] = field(default_factory=queue.SimpleQueue, init=False)
    _thread: threading.Thread | None = field(default=None, init=False)

    def group_id(self, name: str, max_age_s: float = MAX_AGE_S) -> int | None:
        """Return the number of a group, None if no group has this name or no result is known yet.

        A result older than ``max_age_s`` is refreshed for the next caller.
        """
        found = self._look(("group", name), max_age_s)
        return found if isinstance(found, int) else None

    def user_name(self, user_id: int, max_age_s: float = MAX_AGE_S) -> str:
        """Return a user's name, or the number as text if no name is known."""
        found = self._look(("user", user_id), max_age_s)
        return found if isinstance(found, str) else str(user_id)

    async def settled(self, timeout_s: float) -> bool:
        """Wait until all look-ups have ended; return False after ``timeout_s``."""
        asked = [asyncio.wrap_future(future) for future in list(self._asked.values())]
        if not asked:
            return True
        _, unknown = await asyncio.wait(asked, timeout=timeout_s)
        return not unknown

    def _look(self, question: _Question, max_age_s: float) -> _Answer:
        found_s, answer = self._answers.get(question, (float("-inf"), None))
        if time.monotonic() - found_s > max_age_s:
            self._ask(question)
        return answer

    def _ask(self, question: _Question) -> None:
        if question in self._asked or len(self._asked) >= _MAX_ANSWERS:
            return
        self._asked[question] = Future()
        self._questions.put(question)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="names", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            question = self._questions.get()
            try:
                kind, of = question
                answer = self.find_group(of) if kind == "group" else self.find_user(of)
            except OSError:  # no answer now: keep the previous answer
                answer = self._answers.get(question, (0.0, None))[1]
            if len(self._answers) >= _MAX_ANSWERS:
                self._answers.clear()
            self._answers[question] = time.monotonic(), answer
            self._asked.pop(question).set_result(None)


@dataclass(frozen=True, slots=True)
class AdminGroups:
    """Names of the groups that may use the admin socket; the groups need not exist.

    ``names`` resolves the names to numbers, so no method waits long for the name service.
    """

    everything: str
    read_only: str
    names: NameService = field(default_factory=NameService)

    async def look_up(self, timeout_s: float) -> bool:
        """Look the groups' numbers up; return False if a number is unknown after ``timeout_s``."""
        self.names.group_id(self.everything)
        self.names.group_id(self.read_only)
        return await self.names.settled(timeout_s)

    def right_of(self, peer: Peer) -> Right:
        """Return the caller's right: all for root and the daemon's user, else by group.

        A group whose number is unknown has no members.
        """
        if peer.user_id in (0, os.geteuid()):
            return Right.EVERYTHING
        if self.names.group_id(self.everything) in peer.group_ids:
            return Right.EVERYTHING
        if self.names.group_id(self.read_only) in peer.group_ids:
            return Right.READ
        return Right.NOTHING

    async def check(self, peer: Peer, needed: Right) -> None:
        """Check that a caller has a right; look the groups up again before refusing.

        Raises Forbidden: the caller lacks the right; the hint is a command for an administrator.
        """
        if self.right_of(peer) >= needed:
            return
        for group in (self.everything, self.read_only):
            self.names.group_id(group, _REFUSAL_MAX_AGE_S)
        self.names.user_name(peer.user_id)
        await self.names.settled(_LOOK_UP_LIMIT_S)
        right = self.right_of(peer)
        if right < needed:
            raise self._forbidden(self.names.user_name(peer.user_id), right)

    def _forbidden(self, user: str, right: Right) -> Forbidden:
        change = f"{self._join(self.everything, user)} (full access)"
        if right is Right.READ:
            what, how = "may only read", change
        else:
            what = "may not use the admin socket"
            how = f"{self._join(self.read_only, user)} (read-only access), or {change}"
        return Forbidden(
            f"the user {user} {what}", f"ask an administrator to run: {how}; then log in again"
        )

    def _join(self, group: str, user: str) -> str:
        create = "" if self.names.group_id(group) is not None else f"groupadd --system {group} && "
        return f"{create}usermod -aG {group} {user}"


def needed_for(method: str) -> Right:
    """Return the right needed for calls with this HTTP method."""
    return Right.READ if method in READING_METHODS else Right.EVERYTHING
