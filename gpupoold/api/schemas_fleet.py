"""Bodies of the admin API about the daemon's fleet."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from gpupoold.access.rate_use import RateUse
from gpupoold.api.schemas import Body

_MAX_KEYS = 10_000
_MAX_COUNT = 10**15


class SetFleetRequest(Body):
    """Body of ``PUT /fleet``: the secret of the fleet in hex, empty to leave the fleet."""

    secret: str = Field(max_length=64)


class ChargeKeysRequest(Body):
    """Body of ``POST /fleet/charges``: new use of API keys on other nodes, by the keys' ids."""

    uses: Annotated[dict[str, RateUse], Field(max_length=_MAX_KEYS)]

    @field_validator("uses")
    @classmethod
    def _bounded(cls, uses: dict[str, RateUse]) -> dict[str, RateUse]:
        if any(not 0 <= count <= _MAX_COUNT for use in uses.values() for count in use):
            raise ValueError(f"a number of requests or tokens is not from 0 to {_MAX_COUNT}")
        return uses


class FleetModel(Body):
    """A model of a node, for the fleet's routing and placement.

    ``names`` are the model's name, aliases, presets and adapters; ``ttft_s``, ``tbt_s`` and
    ``pace`` are those of the registry. ``first_token_in_s`` is the
    estimate for a request that arrives now, None without one. ``load``, ``busy_share``,
    ``window_s`` and ``kv_bytes`` are those of :class:`gpupoold.scheduling.pressure.ModelDemand` on
    one device.
    """

    name: str
    names: list[str]
    state: str
    error: str = ""
    weights_bytes: int
    num_live: int
    first_token_in_s: float | None
    ttft_s: float
    tbt_s: float
    pace: str = ""
    load: float = 0.0
    busy_share: float = 0.0
    window_s: float
    kv_bytes: float = 0.0


class FleetReport(Body):
    """Body of ``GET /fleet``: what the fleet needs to know of a node.

    ``device_bytes`` has the memory of each ready device, ``bandwidth_bytes_per_s`` the highest rate
    of switches, ``cache_free_bytes`` the free host memory for weights, ``key_names`` the names of
    API keys by id, ``rate_uses`` the use of keys with rates since the daemon's start.
    """

    secret: str
    http_url: str
    is_ready: bool
    device_bytes: list[int]
    bandwidth_bytes_per_s: float
    cache_free_bytes: int = 0
    key_names: dict[str, str] = Field(default={})
    rate_uses: dict[str, RateUse] = Field(default={})
    models: list[FleetModel]
