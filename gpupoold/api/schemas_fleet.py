"""Bodies of the admin API about the daemon's fleet."""

from __future__ import annotations

from pydantic import Field

from gpupoold.api.schemas import Body


class SetFleetRequest(Body):
    """Body of ``PUT /fleet``: the secret of the fleet in hex, empty to leave the fleet."""

    secret: str = Field(max_length=64)


class FleetModel(Body):
    """A model of a node, for the fleet's routing and placement.

    ``first_token_in_s`` is the estimate for a request that arrives now, None without one.
    ``load`` is the share of a device that the requests of the last minutes need at the model's
    speed, on the device that is the fastest for the model.
    """

    name: str
    state: str
    source: str
    weights_bytes: int
    load: float
    num_live: int
    num_waiting: int
    first_token_in_s: float | None
    is_resident: bool
    aliases: list[str] = Field(default=[])


class FleetReport(Body):
    """Body of ``GET /fleet``: what the fleet needs to know of a node.

    ``device_bytes`` has the memory of each device that is ready, ``host_bytes`` the budget of the
    model cache; ``started_at`` is wall-clock time.
    """

    secret: str
    http_url: str
    is_ready: bool
    started_at: float
    device_bytes: list[int]
    host_bytes: int
    models: list[FleetModel]
