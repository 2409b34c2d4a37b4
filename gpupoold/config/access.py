"""``[access]``: who gets in."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpupoold.config.values import HostNames, Section


class AccessSettings(Section):
    """``[access]``: when the API asks for keys, and which groups may use the admin socket.

    ``auto``: a key is needed wherever other machines can connect. ``host_names`` are the names,
    beside those of the loopback address, by which clients without a key may call the API.
    """

    require_keys: Literal["auto", "always"] = "auto"
    host_names: HostNames = ()
    admin_group: str = Field(default="gpupool", min_length=1)
    read_only_group: str = Field(default="gpupool-ro", min_length=1)
