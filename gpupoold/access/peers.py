"""Who is at the other end of the admin socket, and what they may do there.

The kernel tells (``SO_PEERCRED``, ``SO_PEERGROUPS``): nobody can claim to be somebody else.
"""

from __future__ import annotations

import ctypes
import enum
import os
import socket
import struct
from dataclasses import dataclass, field

from gpupoold.access.names import NameService
from gpupoold.errors import Forbidden

# Linux 4.13; Python has no name for it.
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_GROUP_ID = struct.Struct("I")
_MAX_GROUP_BYTES = 65536 * _GROUP_ID.size  # NGROUPS_MAX

# How old an answer may be that keeps somebody out, and how long a caller waits for a newer one.
_REFUSAL_MAX_AGE_S = 2.0
_LOOK_UP_LIMIT_S = 1.0

# These only look. Their answers hold neither prompts nor keys.
READING_METHODS = frozenset({"GET", "HEAD"})


class Right(enum.IntEnum):
    """What a caller may do; each includes those before."""

    NOTHING = 0
    READ = 1
    EVERYTHING = 2


@dataclass(frozen=True, slots=True)
class Peer:
    """A process at the other end of a unix socket, as it was when it connected.

    ``group_ids`` are all its groups.
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
    """The supplementary groups of a peer; none where the kernel does not tell."""
    # socket.getsockopt() takes 1,024 bytes at most: 256 groups.
    found = ctypes.create_string_buffer(_MAX_GROUP_BYTES)
    length = ctypes.c_uint32(_MAX_GROUP_BYTES)
    status = ctypes.CDLL(None).getsockopt(
        connection.fileno(), socket.SOL_SOCKET, _SO_PEERGROUPS, found, ctypes.byref(length)
    )
    if status != 0:
        return []
    return [number for (number,) in _GROUP_ID.iter_unpack(found.raw[: length.value])]


@dataclass(frozen=True, slots=True)
class AdminGroups:
    """The names of the groups that may use the admin socket; they need not exist.

    Their numbers are those of ``names``: no call here waits for the name service for long.
    """

    everything: str
    read_only: str
    names: NameService = field(default_factory=NameService)

    async def look_up(self, timeout_s: float) -> bool:
        """Ask for the groups' numbers; False: they are not known after ``timeout_s``."""
        self.names.group_id(self.everything)
        self.names.group_id(self.read_only)
        return await self.names.settled(timeout_s)

    def right_of(self, peer: Peer) -> Right:
        """What this caller may do: root and the daemon's own user everything, others by group.

        As far as the groups are known: before they are, nobody is in them.
        """
        if peer.user_id in (0, os.geteuid()):
            return Right.EVERYTHING
        if self.names.group_id(self.everything) in peer.group_ids:
            return Right.EVERYTHING
        if self.names.group_id(self.read_only) in peer.group_ids:
            return Right.READ
        return Right.NOTHING

    async def check(self, peer: Peer, needed: Right) -> None:
        """See that a caller has a right; who has not is looked up once more.

        Raises:
            Forbidden: with the command that an administrator has to run.
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
        change = f"{self._join(self.everything, user)} (to change things)"
        if right is Right.READ:
            what, how = "may only look, not change anything", change
        else:
            what = "may not use the admin socket"
            how = f"{self._join(self.read_only, user)} (to look), or {change}"
        return Forbidden(
            f"the user {user} {what}",
            f"an administrator has to run: {how}; then log in again",
        )

    def _join(self, group: str, user: str) -> str:
        create = "" if self.names.group_id(group) is not None else f"groupadd --system {group} && "
        return f"{create}usermod -aG {group} {user}"


def needed_for(method: str) -> Right:
    """The right to make calls by this HTTP method."""
    return Right.READ if method in READING_METHODS else Right.EVERYTHING
