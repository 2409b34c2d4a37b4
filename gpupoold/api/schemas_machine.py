"""Bodies of the admin API about the daemon's surroundings, for ``gpupool doctor``."""

from __future__ import annotations

from pydantic import BaseModel

from gpupoold.domain import Folder


class MachineInfo(BaseModel):
    """The surroundings of a daemon: ``config_path`` is None without a file.

    The folders are as the daemon finds them, in its own namespace and as its user.

    The limits are soft limits of the daemon's process; None means unlimited.
    """

    config_path: str | None
    folders: list[Folder]
    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    address_space_bytes: int | None = None
    memory_limit_bytes: int | None
