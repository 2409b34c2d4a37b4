"""A process that cannot be started, or ends, is started again."""

from __future__ import annotations

import asyncio

import pytest

from gpupoold.control.processes import backoff
from gpupoold.control.processes.restarts import keep_running


async def test_starts_that_fail_are_logged_and_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 0.001)
    runs_again = asyncio.Event()
    errors = [OSError("the fork server could not fork: EAGAIN"), OSError("no socket"), None]

    async def run_once() -> bool:
        error = errors.pop(0)
        if error is not None:
            raise error
        runs_again.set()
        await asyncio.sleep(60)
        return True

    task = asyncio.create_task(keep_running("the frontend", run_once))
    async with asyncio.timeout(20):
        await runs_again.wait()
    task.cancel()
    assert "the frontend could not be started: the fork server could not fork" in caplog.text
    assert "the frontend could not be started: no socket" in caplog.text
