"""Protocols of the dispatcher's dependencies, which in turn depend on the dispatcher."""

from __future__ import annotations

from typing import Protocol

from gpupoold.control.requests.admission import KeyBounds
from gpupoold.wire import messages as m


class Warmth(Protocol):
    """Warmth of models, whose snapshots must be restored before requests can run."""

    def is_warm(self, model: str) -> bool:
        """Return whether all workers with the model have its snapshot."""

    def begin(self, model: str) -> object:
        """Start warming the model unless in progress; ``go_on`` or ``fail_waiting`` follows."""

    def used(self, model: str) -> None:
        """The model has got a request."""

    def left(self, model: str) -> None:
        """A request of the model has ended."""

    def damaged(self, message: m.WrongAnswer) -> None:
        """End the model's requests and renew its snapshot, because its bytes are wrong."""


class Verdicts(Protocol):
    """Outcomes of requests that were tried alone."""

    def convicted(self, model: str, request_id: str) -> None:
        """The request ended a worker alone, and has been ended."""

    def answered(self, model: str) -> None:
        """A request of the model has got past where a worker died, or has ended well."""

    def left_over(self, model: str) -> None:
        """Attribute a crash to the model, because all its candidate requests are cleared."""


class Keys(KeyBounds, Protocol):
    """Use of API keys by requests."""

    def used(self, key_id: str, *, num_requests: int = 0, num_tokens: int = 0) -> None:
        """Count requests that begin, or the tokens of a request that ended."""

    def charge(self, key_id: str, num_tokens: int) -> None:
        """Tokens of a prompt or an answer count for the rate of a key."""
