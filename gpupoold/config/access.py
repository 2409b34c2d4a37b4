"""The section ``[access]``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpupoold.config.values import HostNames, Section


class AccessSettings(Section):
    """``[access]``: the need for API keys, and the groups that may use the admin socket.

    ``auto`` requires keys if other machines can connect. ``host_names`` are host names that clients
    without a key may use, besides the names of the loopback address. With ``share_prefixes``,
    requests use cached KV of requests of other keys.
    """

    require_keys: Literal["auto", "always"] = "auto"
    host_names: HostNames = ()
    share_prefixes: bool = False
    admin_group: str = Field(default="gpupool", min_length=1)
    read_only_group: str = Field(default="gpupool-ro", min_length=1)
