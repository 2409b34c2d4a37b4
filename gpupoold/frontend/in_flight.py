"""Bytes of requests being read or answered, bounded per key and in total."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar

from gpupoold.domain import KEY_BYTES_SHARE
from gpupoold.frontend.errors import ApiError, needs_too_much, no_room
from gpupoold.frontend.gates import refuse


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
        token = _current.set(holding)
        try:
            yield holding
        finally:
            _current.reset(token)
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
            raise needs_too_much(bound)
        of_key = self._of_keys[key_id] + num_bytes
        if of_key > bound or self.num_bytes + num_bytes > self.max_bytes:
            raise no_room(bound if of_key > bound else self.max_bytes)
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


_current: ContextVar[BodyHolding | None] = ContextVar("body_holding", default=None)


def charge(num_bytes: int, refused: Callable[[str], Exception]) -> None:
    """Add bytes to the share of the request being served, from inside of a model's API.

    Raises:
        Exception: an error from ``refused``, in place of which the client gets 413 or 429.
    """
    holding = _current.get()
    if holding is None:
        return
    try:
        holding.add(num_bytes)
    except ApiError as error:
        refuse(error)
        raise refused(error.message) from error
