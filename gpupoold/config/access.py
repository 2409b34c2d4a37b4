"""The section ``[access]``."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from gpupoold.config.values import ANY_ORIGIN, HostNames, Origins, Section


class AccessSettings(Section):
    """``[access]``: the need for API keys, and the groups that may use the admin socket."""

    require_keys: Literal["auto", "always"] = "auto"
    """`"auto"`: API keys are required unless only this machine can connect; `"always"`: API keys
    are always required, for example behind a proxy on the same machine.
    """
    host_names: HostNames = ()
    """Names, besides those of the loopback address, under which clients without a key may call the
    API.
    """
    allowed_origins: Origins = ()
    """Origins of other sites whose pages may call the API, as browsers send them, such as
    `["https://app.example", "http://localhost:3000"]`; `["*"]` allows all origins and needs
    `require_keys = "always"`.
    """
    share_prefixes: bool = False
    """Whether requests use cached KV of requests of other keys."""
    admin_group: str = Field(default="gpupool", min_length=1)
    """Group with full access to the admin socket; need not exist."""
    read_only_group: str = Field(default="gpupool-ro", min_length=1)
    """Group with read access to the admin socket; need not exist."""

    @model_validator(mode="after")
    def _needs_keys_for_any_origin(self) -> Self:
        if ANY_ORIGIN in self.allowed_origins and self.require_keys != "always":
            raise ValueError(
                'allowed_origins = ["*"] needs require_keys = "always": without keys, each page '
                "that a browser of this machine opens could call the API"
            )
        return self
