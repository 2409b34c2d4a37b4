"""What a dispatcher needs of other parts, which need the dispatcher."""

from __future__ import annotations

from typing import Protocol

from gpupoold.control.requests.admission import KeyBounds
from gpupoold.wire import messages as m


class Warmth(Protocol):
    """What a dispatcher needs to know of snapshots: a model without one has to be warmed first."""

    def is_warm(self, model: str) -> bool:
        """Return whether all workers that have the model have its snapshot."""

    def begin(self, model: str) -> object:
        """Warm the model, unless that is under way; ``go_on`` or ``fail_waiting`` follows."""

    def used(self, model: str) -> None:
        """The model has got a request."""

    def left(self, model: str) -> None:
        """A request of the model has ended."""

    def damaged(self, message: m.WrongAnswer) -> None:
        """The model's bytes are wrong: its requests end, and it is made anew."""


class Verdicts(Protocol):
    """What is made of requests that have been tried alone."""

    def convicted(self, model: str, request_id: str) -> None:
        """The request ended a worker alone, and has been ended."""

    def answered(self, model: str) -> None:
        """A request of the model has got past where a worker died, or has ended well."""

    def left_over(self, model: str) -> None:
        """A crash is due to the model: the requests that it could be due to are cleared."""


class Keys(KeyBounds, Protocol):
    """What a dispatcher tells of the use of API keys."""

    def used(self, key_id: str, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """A key has begun requests, or one of them has ended with so many tokens."""

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Tokens of a prompt or an answer count for the rate of a key."""
