"""What the daemon and its frontend tell each other of API keys; never a key itself."""

from __future__ import annotations

import msgspec

from gpupoold.domain import Priority
from gpupoold.wire.base import Message


class KeyRecord(msgspec.Struct, frozen=True):
    """A key that may be valid: its id, the hashes to compare with, and what it may do.

    ``previous_digest`` counts until ``previous_until``. ``models`` None: all; none of them:
    it may read the metrics and nothing else. Wall-clock seconds.
    """

    id: str
    name: str
    digest: str
    previous_digest: str = ""
    previous_until: float = 0.0
    models: tuple[str, ...] | None = None
    priority: Priority = Priority.NORMAL
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    expires_at: float | None = None


class KeyLevels(msgspec.Struct):
    """What a key has left of its rates at ``at_s``; None of a rate that is not limited."""

    at_s: float
    requests: float | None = None
    tokens: float | None = None


class AccessRules(Message):
    """Who may ask (daemon → frontend); replaces the rules sent before.

    ``levels`` are those that the frontend before had reported, by the keys' ids.
    """

    keys: list[KeyRecord]
    are_required: bool
    levels: dict[str, KeyLevels] = {}


class AccessReport(Message):
    """What is left of the rates of keys that were used since the last report, and how many
    requests had no valid key (frontend → daemon, about once a second)."""

    levels: dict[str, KeyLevels]
    num_unauthorised: int = 0
