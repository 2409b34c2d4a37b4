"""Bytes of requests being read or answered, bounded per key and in total."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator

from gpupoold.api_keys import KEY_BYTES_SHARE
from gpupoold.frontend.errors import ApiError, over_rate
from gpupoold.frontend.request_bounds import RequestLocal

_RETRY_NO_ROOM_S = 1.0


class BytesInFlight:
    """Bodies of HTTP requests, each counted from its first byte to the end of its answer.

    ``max_bytes`` may change at any time. For the event loop.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._of_keys: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._of_keys.total()

    @contextlib.contextmanager
    def holding(self, key_id: str) -> Iterator[BodyHolding]:
        """Hold bytes for one request of a key ("" without one) during the context."""
        holding = BodyHolding(self, key_id)
        try:
            with body_holding.holding(holding):
                yield holding
        finally:
            self._of_keys[key_id] -= holding.num_bytes
            if not self._of_keys[key_id]:
                del self._of_keys[key_id]

    def take(self, holding: BodyHolding, num_bytes: int) -> None:
        """Add bytes to a request's share.

        Raises:
            ApiError: 413 if the share could never be granted, 429 if not now.
        """
        key_id = holding.key_id
        bound = self.bound_of(key_id)
        if holding.num_bytes + num_bytes > bound:
            raise ApiError(
                413,
                "The request body, counted `n` times, with what its answer needs, is larger than "
                f"the {bound:,} bytes that may be in flight at once.",
            )
        of_key = self._of_keys[key_id] + num_bytes
        if of_key > bound or self.num_bytes + num_bytes > self.max_bytes:
            full_bytes = bound if of_key > bound else self.max_bytes
            raise over_rate(
                f"The requests in flight have nearly {full_bytes:,} bytes already: there is no "
                "room for this one now.",
                _RETRY_NO_ROOM_S,
            )
        self._of_keys[key_id] = of_key
        holding.num_bytes += num_bytes

    def bound_of(self, key_id: str) -> int:
        """Return the limit of a key's requests together."""
        return int(self.max_bytes * KEY_BYTES_SHARE) if key_id else self.max_bytes


class BodyHolding:
    """One request's share of the bytes in flight."""

    def __init__(self, room: BytesInFlight, key_id: str) -> None:
        self._room = room
        self.key_id = key_id
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        """Add bytes; see :meth:`BytesInFlight.take`."""
        self._room.take(self, num_bytes)


body_holding: RequestLocal[BodyHolding] = RequestLocal("body_holding")
