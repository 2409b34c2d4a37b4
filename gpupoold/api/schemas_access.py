"""Bodies of the admin API about API keys."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gpupoold.api.schemas import Body, PaceText

PriorityName = Literal["high", "normal", "low"]


class AddKeyRequest(Body):
    """Body of ``POST /keys``; a limit of None means no limit.

    ``models`` None allows all models, an empty list only the metrics. ``expires_at`` is in
    wall-clock seconds. With ``id`` and ``digest`` the key exists already, in the daemon's fleet;
    such a key may name models that the daemon does not have.
    """

    name: str
    id: str = Field(default="", pattern=r"^([A-Za-z0-9]{8})?$")
    digest: str = Field(default="", pattern=r"^([0-9a-f]{64})?$")
    models: list[str] | None = None
    priority: PriorityName = "normal"
    requests_per_minute: int | None = Field(default=None, gt=0)
    tokens_per_minute: int | None = Field(default=None, gt=0)
    max_live: int | None = Field(default=None, gt=0)
    expires_at: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pace: PaceText = ""


class SetKeyRequest(Body):
    """``PATCH /keys/{name}``; None leaves a value as it is.

    0 removes a limit or the expiry; ``all_models`` removes the restriction to some models.
    """

    models: list[str] | None = None
    all_models: bool = False
    priority: PriorityName | None = None
    requests_per_minute: int | None = Field(default=None, ge=0)
    tokens_per_minute: int | None = Field(default=None, ge=0)
    max_live: int | None = Field(default=None, ge=0)
    expires_at: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    pace: PaceText | None = None


class RotateKeyRequest(Body):
    """Body of ``POST /keys/{name}/rotate``: how long the old secret stays valid."""

    grace_s: float = Field(default=0.0, ge=0, allow_inf_nan=False)


class KeyInfo(Body):
    """An API key without its secret; times in wall-clock seconds.

    ``id`` is the public part of the text. Until ``previous_until`` the secret before the last
    rotation is valid too. ``num_tokens`` counts prompts and answers. ``requests_left`` and
    ``tokens_left`` of this minute are about a second old; a negative value is a debt.
    """

    id: str
    name: str
    models: list[str] | None
    priority: PriorityName
    requests_per_minute: int | None
    tokens_per_minute: int | None
    max_live: int | None
    created_at: float
    expires_at: float | None
    rotated_at: float | None
    previous_until: float | None
    revoked_at: float | None
    last_used_at: float | None
    num_requests: int
    num_tokens: int
    requests_left: float | None = None
    tokens_left: float | None = None
    pace: str = ""


class NewKey(Body):
    """A key after creation or rotation; no other answer contains the text."""

    key: KeyInfo
    text: str = Field(repr=False)
