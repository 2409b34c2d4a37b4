"""Bodies of the admin API about the daemon's surroundings, for ``gpupool doctor``."""

from __future__ import annotations

from pydantic import BaseModel


class FolderInfo(BaseModel):
    """A folder of the configuration as the daemon finds it, in its own namespace and as its user.

    For a missing folder the facts are those of the nearest parent. ``owner`` is a user id;
    ``num_bytes`` is the size of the content, 0 if not measured; ``hint`` says how to let the daemon
    write to the folder, empty if the daemon can.
    """

    key: str
    path: str
    exists: bool
    is_writable: bool
    owner: int
    filesystem: str
    free_bytes: int
    num_bytes: int
    hint: str


class MachineInfo(BaseModel):
    """The surroundings of a daemon: ``config_path`` is None without a file.

    The limits are soft limits of the daemon's process; None means unlimited.
    """

    config_path: str | None
    folders: list[FolderInfo]
    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    address_space_bytes: int | None = None
    memory_limit_bytes: int | None
