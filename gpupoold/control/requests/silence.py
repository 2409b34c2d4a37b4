"""Reasons for a long time without a token."""

from __future__ import annotations

from gpupoold.control.live_requests import LiveRequest
from gpupoold.scheduling.state import State


def waits_for(request: LiveRequest, state: State, *, has_hosts: bool) -> str:
    """Return the cause of a request's wait, in words; ``has_hosts``: a worker has the model."""
    if request.is_cold:
        return f"{request.model} is not in host memory yet"
    if request.is_held:
        return "the request may have crashed a worker and waits to be retried alone"
    if not has_hosts:
        return f"no device has {request.model} now"
    if request.device is None:
        return "no device has taken the request"
    device = state.devices.get(request.device)
    if device is None or device.turn is None or device.turn.model != request.model:
        return f"the request waits for the turn of {request.model} on device {request.device}"
    return f"device {request.device} is running the request but does not respond"
