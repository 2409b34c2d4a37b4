"""The relay for a client's request."""

from __future__ import annotations

from gpupoold.fleet.choices import ChoicesRelay
from gpupoold.fleet.relay import Relay
from gpupoold.fleet.typed_events import TypedRelay
from gpupoold.fleet.wanted import CHOICES_PATHS, RESPONSES, Wanted


def make_relay(path: str, wanted: Wanted) -> Relay:
    """Return the relay for the events of a path's answers."""
    if path in CHOICES_PATHS:
        return ChoicesRelay(has_logprobs=wanted.wants_logprobs)
    return TypedRelay(is_responses=path == RESPONSES)
