"""Messages about API keys between the daemon and its frontends; none contains a key's text."""

from __future__ import annotations

from dataclasses import dataclass

from gpupoold.domain import KeyPowers
from gpupoold.wire.base import Message


@dataclass(frozen=True)
class KeyRecord(KeyPowers):
    """A key that may be valid; times in wall-clock seconds.

    ``previous_digest`` is valid until ``previous_until``. If ``is_rate_limited``, the daemon must
    permit each request, see ``AskRate``.
    """

    id: str
    name: str
    digest: str
    previous_digest: str = ""
    previous_until: float = 0.0


class AccessRules(Message):
    """Rules of access (daemon → frontend); replace all earlier rules.

    ``host_names`` are hosts in lower case, besides loopback, for requests without a key. With
    ``share_prefixes``, requests use cached KV of requests of other keys. ``allowed_origins`` are
    the origins of other sites whose pages have access; ``*`` means all.
    """

    keys: list[KeyRecord]
    are_required: bool
    host_names: tuple[str, ...] = ()
    share_prefixes: bool = False
    allowed_origins: tuple[str, ...] = ()


class FleetSecret(Message):
    """The secret of the daemon's fleet, empty without a fleet (daemon → frontend).

    ``downloads`` is the folder of downloaded checkpoints, for other nodes.
    """

    secret: str
    downloads: str


class AccessReport(Message):
    """Number of requests without a valid key since the last report (frontend → daemon).

    Sent about once a second.
    """

    num_unauthorised: int


class AskRate(Message):
    """A request for permission to begin an HTTP request with a key (frontend → daemon).

    Sent for keys that are ``is_rate_limited``; answered by ``RateAnswer``. A permitted request is
    counted.
    """

    call_id: int
    key_id: str


class RateAnswer(Message):
    """The HTTP request may begin if ``wait_s`` is 0; else ``limit``, such as "3 requests per
    minute", was reached and a request may begin in ``wait_s`` seconds."""

    call_id: int
    limit: str = ""
    wait_s: float = 0.0
