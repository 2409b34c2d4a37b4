"""The history's limits from the configuration."""

from __future__ import annotations

from gpupool_state import HistoryLimits
from gpupoold.config.sections import HistorySettings


def history_limits(settings: HistorySettings) -> HistoryLimits:
    """Return the maximum numbers of rows."""
    return HistoryLimits(
        num_requests=settings.max_requests,
        num_switches=settings.max_switches,
        num_events=settings.max_events,
        num_minutes=settings.max_minutes,
        num_usage_hours=settings.max_usage_hours,
        num_device_minutes=settings.max_device_minutes,
    )
