"""The section ``[access]``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from gpupoold.config.values import ANY_ORIGIN, HostNames, Origins, Section


class AccessSettings(Section):
    """``[access]``: the need for API keys, and the groups that may use the admin socket.

    ``auto`` requires keys if other machines can connect. ``host_names`` are host names that clients
    without a key may use, besides the names of the loopback address. ``allowed_origins`` are the
    origins of other sites whose pages may call the API. With ``share_prefixes``, requests use
    cached KV of requests of other keys.
    """

    require_keys: Literal["auto", "always"] = "auto"
    host_names: HostNames = ()
    allowed_origins: Origins = ()
    share_prefixes: bool = False
    admin_group: str = Field(default="gpupool", min_length=1)
    read_only_group: str = Field(default="gpupool-ro", min_length=1)

    @model_validator(mode="after")
    def _needs_keys_for_any_origin(self) -> Self:
        if ANY_ORIGIN in self.allowed_origins and self.require_keys != "always":
            raise ValueError(
                'allowed_origins = ["*"] needs require_keys = "always": without keys, each page '
                "that a browser of this machine opens could call the API"
            )
        return self
