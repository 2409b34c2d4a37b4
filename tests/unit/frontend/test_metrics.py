"""``/metrics`` on the frontend's port: asked for over the wire, shared, bounded in time."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from gpupoold.frontend.daemon_calls import MetricsCalls
from gpupoold.frontend.errors import ApiError
from gpupoold.wire.messages import AskMetrics, MetricsText


class FakeDaemon:
    """Answers each question with its number, unless it is ``silent``."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.asked: list[int] = []
        self.silent = False
        self.calls = MetricsCalls(self._send, timeout_s)

    def _send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, AskMetrics)
        self.asked.append(message.call_id)
        if not self.silent:
            answer = MetricsText(message.call_id, b"up %d\n" % message.call_id)
            asyncio.get_running_loop().call_soon(self.calls.answered, answer)


async def test_those_who_ask_at_once_share_an_answer() -> None:
    daemon = FakeDaemon()
    assert await asyncio.gather(*(daemon.calls.text() for _ in range(3))) == [b"up 1\n"] * 3
    assert await daemon.calls.text() == b"up 2\n"
    assert daemon.asked == [1, 2]


async def test_daemon_that_does_not_answer_is_503_and_asked_again_later() -> None:
    daemon = FakeDaemon(timeout_s=0.01)
    daemon.silent = True
    with pytest.raises(ApiError) as caught:
        await daemon.calls.text()
    assert caught.value.status == 503
    assert caught.value.headers()
    daemon.calls.answered(MetricsText(1, b"too late"))
    daemon.silent = False
    assert await daemon.calls.text() == b"up 2\n"


async def test_those_who_wait_for_an_answer_give_up_together() -> None:
    daemon = FakeDaemon(timeout_s=0.05)
    daemon.silent = True
    first = asyncio.create_task(daemon.calls.text())
    await asyncio.sleep(0.03)
    second = asyncio.create_task(daemon.calls.text())
    for task in (first, second):
        with pytest.raises(ApiError):
            await task
    assert daemon.asked == [1]


async def test_one_who_gives_up_takes_no_answer_from_the_others() -> None:
    daemon = FakeDaemon()
    first, second = (asyncio.create_task(daemon.calls.text()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == b"up 1\n"
