"""Owner, group and mode of the admin socket's file."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from gpupoold.access.peers import AdminGroups

_OWN = 0o600
_OF_GROUP = 0o660
_OF_ALL = 0o666


def share_socket(path: Path, groups: AdminGroups) -> None:
    """Give the admin groups access to the socket if this daemon serves the whole machine.

    A daemon of root, or of a user whose main group is the admin group, serves the machine; another
    user's daemon stays private. A file has one group only: with a group of readers, everybody may
    connect, and the guard checks the caller's credentials. A group whose number is unknown counts
    as absent.

    Raises:
        OSError: the mode cannot be set.
    """
    admins = groups.names.group_id(groups.everything)
    if os.geteuid() != 0 and os.getegid() != admins:
        path.chmod(_OWN)
        return
    if admins is not None:
        # In a user namespace or a container the group may exist without permission to use it.
        with contextlib.suppress(PermissionError):
            os.chown(path, -1, admins)
    readers = groups.names.group_id(groups.read_only)
    path.chmod(_OF_GROUP if readers is None else _OF_ALL)
