"""What the daemon and its frontend tell each other of API keys; never a key itself."""

from __future__ import annotations

import msgspec

from gpupoold.domain import Priority
from gpupoold.wire.base import Message


class KeyRecord(msgspec.Struct, frozen=True):
    """A key that may be valid: its id, the hashes to compare with, and what it may do.

    ``previous_digest`` counts until ``previous_until``. ``models`` None: all; none of them:
    it may read the metrics and nothing else. ``is_rate_limited``: the daemon has to be asked
    before a request begins, see ``AskRate``. ``max_live``: of its requests; None: any number.
    Wall-clock seconds.
    """

    id: str
    name: str
    digest: str
    previous_digest: str = ""
    previous_until: float = 0.0
    models: tuple[str, ...] | None = None
    priority: Priority = Priority.NORMAL
    is_rate_limited: bool = False
    expires_at: float | None = None
    max_live: int | None = None


class AccessRules(Message):
    """Who may ask (daemon → frontend); replaces the rules sent before.

    ``host_names`` are the hosts, in lower case, that requests without a key may be sent to
    beside loopback.
    """

    keys: list[KeyRecord]
    are_required: bool
    host_names: tuple[str, ...] = ()


class AccessReport(Message):
    """How many requests had no valid key since the last report (frontend → daemon, about once
    a second)."""

    num_unauthorised: int


class AskRate(Message):
    """May an HTTP request with this key begin (frontend → daemon)? Sent for keys that are
    ``is_rate_limited``; answered by ``RateAnswer``. A request that may begin is counted."""

    call_id: int
    key_id: str


class RateAnswer(Message):
    """The HTTP request may begin if ``wait_s`` is 0; else ``limit``, such as "3 requests per
    minute", was reached and a request may begin in ``wait_s`` seconds."""

    call_id: int
    limit: str = ""
    wait_s: float = 0.0
