"""Who is at the other end of the admin socket, and what they may do there.

The kernel tells (``SO_PEERCRED``, ``SO_PEERGROUPS``): nobody can claim to be somebody else.
"""

from __future__ import annotations

import enum
import grp
import os
import pwd
import socket
import struct
from dataclasses import dataclass

from gpupoold.errors import Forbidden

# Linux 4.13; Python has no name for it.
_SO_PEERGROUPS = 59
_CREDENTIALS = struct.Struct("iII")
_GROUP_ID = struct.Struct("I")
_MAX_GROUP_BYTES = 1024  # Python asks for no more

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

    @property
    def user_name(self) -> str:
        """Its user's name, or number where there is none."""
        try:
            return pwd.getpwuid(self.user_id).pw_name
        except KeyError:
            return str(self.user_id)


def peer_of(connection: socket.socket) -> Peer:
    """Who is connected."""
    size = _CREDENTIALS.size
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    pid, user_id, main_group_id = _CREDENTIALS.unpack(credentials)
    try:
        found = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MAX_GROUP_BYTES)
        others = [number for (number,) in _GROUP_ID.iter_unpack(found)]
    except OSError:  # the kernel has no such option, or the peer more groups than fit
        others = _groups_of(user_id, main_group_id)
    return Peer(pid, user_id, frozenset((main_group_id, *others)))


def _groups_of(user_id: int, main_group_id: int) -> list[int]:
    """The groups that the system's tables give a user."""
    try:
        return os.getgrouplist(pwd.getpwuid(user_id).pw_name, main_group_id)
    except KeyError:
        return []


@dataclass(frozen=True, slots=True)
class AdminGroups:
    """The names of the groups that may use the admin socket; they need not exist."""

    everything: str
    read_only: str

    def right_of(self, peer: Peer) -> Right:
        """What this caller may do: root and the daemon's own user everything, others by group."""
        if peer.user_id in (0, os.geteuid()):
            return Right.EVERYTHING
        if group_id(self.everything) in peer.group_ids:
            return Right.EVERYTHING
        if group_id(self.read_only) in peer.group_ids:
            return Right.READ
        return Right.NOTHING

    def check(self, peer: Peer, right: Right, method: str) -> None:
        """See that a caller with this right may make a call by this method.

        Raises:
            Forbidden: with the command that an administrator has to run.
        """
        if right is Right.EVERYTHING or (right is Right.READ and method in READING_METHODS):
            return
        name = peer.user_name
        missing = self.everything if method not in READING_METHODS else self.read_only
        create = "" if group_id(missing) is not None else f"groupadd --system {missing} && "
        raise Forbidden(
            f"the user {name} may only look, not change anything"
            if right is Right.READ
            else f"the user {name} may not use the admin socket",
            f"an administrator has to run: {create}usermod -aG {missing} {name}; then log in again",
        )


def group_id(name: str) -> int | None:
    """The number of a group, None if there is none of that name."""
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None
