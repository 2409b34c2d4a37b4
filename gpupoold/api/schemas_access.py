"""Bodies of the admin API about API keys."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pydantic import Field, field_validator

from gpupoold.api.schemas import Body, PaceText
from gpupoold.api_keys import KeyFacts, KeyPowers, KeyPriority


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
