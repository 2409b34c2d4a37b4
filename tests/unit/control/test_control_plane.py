"""Looks that are taken again and again."""

from __future__ import annotations

import asyncio

import pytest

from gpupoold.control.control_plane import tick


async def test_one_that_fails_keeps_no_other_from_looking(caplog: pytest.LogCaptureFixture) -> None:
    checks: list[float] = []
    enough = asyncio.Event()

    def fail(_: float) -> None:
        raise ValueError("on purpose")

    def check(now_s: float) -> None:
        checks.append(now_s)
        if len(checks) == 3:
            enough.set()

    ticking = asyncio.create_task(tick((fail, check), 0.001))
    await asyncio.wait_for(enough.wait(), 20)
    ticking.cancel()
    assert checks == sorted(checks)
    assert caplog.text.count("on purpose") >= 3
