"""The configuration message for running processes. A pure conversion."""

from __future__ import annotations

from gpupoold.config.schema import LimitSettings, Settings
from gpupoold.wire.messages import Reconfigure


def reconfigure(settings: Settings) -> Reconfigure:
    """Return the settings that running workers and frontends can apply."""
    return Reconfigure(
        settings.log.level,
        settings.memory.self_check_interval,
        settings.server.max_body_bytes,
        max_live_requests_of_model(settings.limits),
        settings.limits.max_bytes_in_flight // settings.server.frontends,
    )


def max_live_requests_of_model(limits: LimitSettings) -> int:
    """Return the limit of one model's live requests."""
    return min(limits.max_live_requests_per_model, limits.max_live_requests)
