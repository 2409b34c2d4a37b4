"""Remaining rates of API keys: one token bucket per limit of a key.

The daemon owns the buckets, so that a limit holds over all frontends together and survives a
frontend's restart. Pure: the caller gives instants of one monotonic clock.
"""

from __future__ import annotations

from typing import NamedTuple

from gpupoold.access.bucket import Bucket
from gpupoold.access.rate_use import RateUse


class KeyLeft(NamedTuple):
    """Remaining rates of a key; a negative value is a debt, None means no limit."""

    requests: float | None
    tokens: float | None


class KeyRates:
    """The buckets of all keys with limits, by the keys' ids."""

    def __init__(self) -> None:
        self._requests: dict[str, Bucket] = {}
        self._tokens: dict[str, Bucket] = {}
        self._used: dict[str, RateUse] = {}

    @property
    def used(self) -> dict[str, RateUse]:
        """The use of keys with limits in this process, without what :meth:`take` took."""
        return dict(self._used)

    def set(
        self,
        key_id: str,
        requests_per_minute: int | None,
        tokens_per_minute: int | None,
        now_s: float,
    ) -> None:
        """Change a key's limits, None for no limit; past use stays counted."""
        _set(self._requests, key_id, requests_per_minute, now_s)
        _set(self._tokens, key_id, tokens_per_minute, now_s)
        if requests_per_minute is None and tokens_per_minute is None:
            self._used.pop(key_id, None)
        else:
            self._used.setdefault(key_id, RateUse())

    def forget(self, key_id: str) -> None:
        """Remove the buckets of a revoked key."""
        self._requests.pop(key_id, None)
        self._tokens.pop(key_id, None)
        self._used.pop(key_id, None)

    def begin(self, key_id: str, now_s: float) -> tuple[str, float]:
        """Count an HTTP request of a key if the rates permit the request.

        Returns ``("", 0.0)`` for a permitted request, which is counted. Otherwise returns the limit
        and the seconds until a request may begin.
        """
        longest_s, limit = 0.0, ""
        requests, tokens = self._requests.get(key_id), self._tokens.get(key_id)
        for bucket, what in ((requests, "requests"), (tokens, "tokens")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(1, now_s)
            if bucket is not None and wait_s > longest_s:
                longest_s, limit = wait_s, f"{bucket.per_minute} {what} per minute"
        if not longest_s:
            self._count(key_id, RateUse(1, 0))
            if requests is not None:
                requests.take(1, now_s)
        return limit, longest_s

    def charge(self, key_id: str, num_tokens: int, now_s: float) -> None:
        """Count tokens of a prompt or an answer."""
        self._count(key_id, RateUse(0, num_tokens))
        self.take(key_id, RateUse(0, num_tokens), now_s)

    def take(self, key_id: str, use: RateUse, now_s: float) -> None:
        """Take use of a key from the buckets, without counting the use as this process's."""
        requests, tokens = self._requests.get(key_id), self._tokens.get(key_id)
        if requests is not None:
            requests.take(use.num_requests, now_s)
        if tokens is not None:
            tokens.take(use.num_tokens, now_s)

    def left(self, key_id: str, now_s: float) -> KeyLeft:
        """Return the remaining rates of a key."""
        requests, tokens = self._requests.get(key_id), self._tokens.get(key_id)
        return KeyLeft(
            None if requests is None else requests.level(now_s),
            None if tokens is None else tokens.level(now_s),
        )

    def _count(self, key_id: str, use: RateUse) -> None:
        known = self._used.get(key_id)
        if known is not None:
            self._used[key_id] = known + use


def _set(buckets: dict[str, Bucket], key_id: str, per_minute: int | None, now_s: float) -> None:
    old = buckets.pop(key_id, None)
    if per_minute is not None:
        buckets[key_id] = Bucket(per_minute, now_s, None if old is None else old.level(now_s))
