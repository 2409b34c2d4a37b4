"""Messages to the service manager: watchdog pings and the status line."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

from gpupoold.system.systemd import Notifier

_logger = logging.getLogger(__name__)

_STATUS_INTERVAL_S = 5.0
# sd_watchdog_enabled(3) recommends at least two pings per timeout.
_PINGS_PER_TIMEOUT = 3


@contextlib.asynccontextmanager
async def informed(
    notifier: Notifier,
    watchdog_s: float | None,
    summary: Callable[[], str],
    failure_reason: Callable[[float], str],
) -> AsyncIterator[None]:
    """Send status and watchdog pings inside this context.

    The service manager kills a daemon without a ping for ``watchdog_s``; None disables the
    watchdog. ``failure_reason`` takes the monotonic time and returns the reason why the daemon is
    stuck, or an empty text. The event loop calls ``failure_reason``, so a stuck event loop sends no
    ping.
    """
    if not notifier.has_listener:
        yield
        return

    async def inform() -> None:
        interval_s = _STATUS_INTERVAL_S
        if watchdog_s is not None:
            interval_s = min(interval_s, watchdog_s / _PINGS_PER_TIMEOUT)
        reported = ""
        while True:
            problem = failure_reason(time.monotonic())
            if problem and problem != reported:
                _logger.error("no watchdog ping is sent: %s", problem)
            reported = problem
            if not problem and watchdog_s is not None:
                notifier.is_well()
            notifier.status(f"stuck: {problem}" if problem else summary())
            await asyncio.sleep(interval_s)

    task = asyncio.create_task(inform(), name="informing")
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
