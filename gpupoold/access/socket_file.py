"""The file of the admin socket: whose it is, and who may open it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpupoold.access.peers import AdminGroups

_OWN = 0o600
_OF_GROUP = 0o660
_OF_ALL = 0o666


def share_socket(path: Path, groups: AdminGroups) -> None:
    """Let the admin groups open the socket, if this is the daemon of the whole machine.

    That is what root runs, or a user whose main group is the admin group. Anyone else's
    daemon is theirs alone. A file has one group only, so where there is a group of readers
    too everybody may connect, and is then let in or not by the credentials alone: those are
    checked in any case. Groups whose numbers are not known yet are taken for none.

    Raises:
        OSError: the mode cannot be set.
    """
    admins = groups.names.group_id(groups.everything)
    if os.geteuid() != 0 and os.getegid() != admins:
        path.chmod(_OWN)
        return
    if admins is not None:
        # A user namespace or a container may have the group, and not let us have it.
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, admins)
    readers = groups.names.group_id(groups.read_only)
    path.chmod(_OF_GROUP if readers is None else _OF_ALL)
