"""The lag of an event loop, which delays every token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

_INTERVAL_S = 0.1


async def measure_lag(add: Callable[[float], None], interval_s: float = _INTERVAL_S) -> None:
    """Call ``add`` every ``interval_s`` with the event loop's lag in seconds; never returns."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        add(max(0.0, loop.time() - due_s))
