"""Bodies of the admin API about API keys and the daemon's fleet."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, field_validator

from gpupoold.access.rates import RateUse
from gpupoold.api.schemas import Body, PaceText
from gpupoold.api_keys import KeyFacts, KeyPowers, KeyPriority

_MAX_KEYS = 10_000
_MAX_COUNT = 10**15


class AddKeyRequest(Body, KeyPowers):  # type: ignore[misc]  # frozen, for dataclasses only
    """Body of ``POST /keys``.

    With ``id`` and ``digest`` the key exists already, in the daemon's fleet; such a key may name
    models that the daemon does not have.
    """

    name: str
    id: str = Field(default="", pattern=r"^([A-Za-z0-9]{8})?$")
    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    pace: PaceText = ""

    @field_validator("requests_per_minute", "tokens_per_minute", "max_live", "expires_at")
    @classmethod
    def _check_limit(cls, limit: float | None) -> float | None:
        if limit is not None and not 0 < limit < math.inf:
            raise ValueError("must be greater than 0 and finite")
        return limit


class SetKeyRequest(Body):
    """``PATCH /keys/{name}``; None leaves a value as it is.

    0 removes a limit or the expiry; ``all_models`` removes the restriction to some models.
    """

    models: tuple[str, ...] | None = None
    all_models: bool = False
    priority: KeyPriority | None = None
    requests_per_minute: int | None = Field(default=None, ge=0)
    tokens_per_minute: int | None = Field(default=None, ge=0)
    max_live: int | None = Field(default=None, ge=0)
    expires_at: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    pace: PaceText | None = None


class RotateKeyRequest(Body):
    """Body of ``POST /keys/{name}/rotate``: how long the old secret stays valid."""

    grace_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


@dataclass(frozen=True, kw_only=True)
class KeyInfo(KeyPowers, KeyFacts):
    """An API key without its secret.

    ``requests_left`` and ``tokens_left`` of this minute are about a second old; a negative value is
    a debt.
    """

    requests_left: float | None = None
    tokens_left: float | None = None


class NewKey(Body):
    """A key after creation or rotation; no other answer contains the text."""

    key: KeyInfo
    text: str = Field(repr=False)


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
    ``pace`` are those of the registry. ``first_token_in_s`` is the estimate for a request that
    arrives now, None without one. ``load``, ``busy_share``, ``window_s`` and ``kv_bytes`` are those
    of :class:`gpupoold.scheduling.pressure.ModelDemand` on one device.
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
