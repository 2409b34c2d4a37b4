"""API keys: rights, limits and use. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KeyPriority = Literal["high", "normal", "low"]
"""A key's priority where memory or time is short, see :class:`gpupoold.domain.Priority`."""

KEY_BYTES_SHARE = 0.5
"""Largest share of the bytes in flight for one API key, so that no key blocks all others."""


@dataclass(frozen=True, kw_only=True)
class KeyPowers:
    """An API key's rights and limits; a limit of None means no limit.

    ``models`` is None for all models, and an empty tuple for a key that can only read the metrics.
    ``max_live`` bounds waiting and running requests. ``expires_at`` is in wall-clock seconds.
    ``pace`` is the pace of streams, empty for the model's.
    """

    models: tuple[str, ...] | None = None
    priority: KeyPriority = "normal"
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_live: int | None = None
    expires_at: float | None = None
    pace: str = ""

    @property
    def is_rate_limited(self) -> bool:
        """True if each request needs permission by the daemon."""
        return self.requests_per_minute is not None or self.tokens_per_minute is not None


@dataclass(frozen=True, kw_only=True)
class KeyFacts:
    """A stored key without its secret; times are wall-clock seconds.

    ``id`` is the public part of the text. Until ``previous_until`` the secret before the last
    rotation is valid too. ``num_tokens`` counts prompts and answers.
    """

    id: str
    name: str
    created_at: float
    rotated_at: float | None = None
    previous_until: float | None = None
    revoked_at: float | None = None
    last_used_at: float | None = None
    num_requests: int = 0
    num_tokens: int = 0
