"""Periodic checks."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

_logger = logging.getLogger(__name__)

TICK_S = 1.0


async def tick(looks: Sequence[Callable[[float], None]], interval_s: float = TICK_S) -> None:
    """Call all of ``looks`` periodically with the monotonic time; an error stops no other call."""
    while True:
        for look in looks:
            try:
                look(time.monotonic())
            except Exception:
                _logger.exception("looking after the pool")
        await asyncio.sleep(interval_s)
