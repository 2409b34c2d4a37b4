"""Reasons for a long time without a token."""

from __future__ import annotations

from collections.abc import Callable

from gpupoold.control.live_requests import LiveRequest


def waits_for(
    request: LiveRequest, *, has_hosts: bool, on_turn: Callable[[int], str | None]
) -> str:
    """Return the cause of a request's wait, in words.

    ``has_hosts``: a worker has the model; ``on_turn`` returns the present model of a worker.
    """
    if request.is_cold:
        return f"{request.model} is not in host memory yet"
    if request.is_held:
        return "the request may have crashed a worker and waits to be retried alone"
    if not has_hosts:
        return f"no device has {request.model} now"
    if request.device is None:
        return "no device has taken the request"
    if on_turn(request.device) != request.model:
        return f"the request waits for the turn of {request.model} on device {request.device}"
    return f"device {request.device} is running the request but does not respond"
