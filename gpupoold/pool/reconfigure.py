"""What processes that run are told of the configuration. A pure conversion."""

from __future__ import annotations

from gpupoold.config import Settings
from gpupoold.wire.messages import Reconfigure


def reconfigure(settings: Settings) -> Reconfigure:
    """All that workers and the frontend can heed while they run."""
    return Reconfigure(
        settings.log.level, settings.memory.canary_interval, settings.server.max_body_bytes
    )
