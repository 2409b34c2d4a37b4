"""What processes that run are told of the configuration. A pure conversion."""

from __future__ import annotations

from gpupoold.config.schema import LimitSettings, Settings
from gpupoold.wire.messages import Reconfigure


def reconfigure(settings: Settings) -> Reconfigure:
    """All that workers and the frontend can heed while they run."""
    return Reconfigure(
        settings.log.level,
        settings.memory.self_check_interval,
        settings.server.max_body_bytes,
        max_live_requests_of_model(settings.limits),
        settings.limits.max_bytes_in_flight // settings.server.frontends,
    )


def max_live_requests_of_model(limits: LimitSettings) -> int:
    """The most requests of one model that may wait or run."""
    return min(limits.max_live_requests_per_model, limits.max_live_requests)
