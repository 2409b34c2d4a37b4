"""Bodies of the admin API about the daemon's fleet."""

from __future__ import annotations

from pydantic import Field

from gpupoold.api.schemas import Body


class SetFleetRequest(Body):
    """Body of ``PUT /fleet``: the secret of the fleet in hex, empty to leave the fleet."""

    secret: str = Field(max_length=64)


class FleetModel(Body):
    """A model of a node, for the fleet's routing and placement.

    ``names`` are the model's name, aliases, presets and adapters. ``first_token_in_s`` is the
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
    load: float = 0.0
    busy_share: float = 0.0
    window_s: float
    kv_bytes: float = 0.0


class FleetReport(Body):
    """Body of ``GET /fleet``: what the fleet needs to know of a node.

    ``device_bytes`` has the memory of each ready device, ``bandwidth_bytes_per_s`` the highest rate
    of switches, ``cache_free_bytes`` the free host memory for weights, ``key_names`` the names of
    API keys by id.
    """

    secret: str
    http_url: str
    is_ready: bool
    device_bytes: list[int]
    bandwidth_bytes_per_s: float
    cache_free_bytes: int = 0
    key_names: dict[str, str] = Field(default={})
    models: list[FleetModel]
