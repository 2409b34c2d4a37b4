"""The lag of an event loop."""

from __future__ import annotations

import asyncio
import time

from gpupoold.system.process import measure_lag


async def test_what_holds_the_loop_up_is_seen() -> None:
    lags_s: list[float] = []
    measuring = asyncio.create_task(measure_lag(lags_s.append, 0.001))
    await asyncio.sleep(0)
    time.sleep(0.05)
    while not lags_s:
        await asyncio.sleep(0.001)
    measuring.cancel()
    assert lags_s[0] >= 0.04
    assert all(lag_s >= 0 for lag_s in lags_s)
