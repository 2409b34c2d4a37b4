"""The daemon's side of the rates of API keys: one answer for all."""

from __future__ import annotations

import asyncio

import msgspec

from gpupoold.frontend.daemon_calls import RateCalls
from gpupoold.wire.messages import AskRate, RateAnswer


class FakeRates:
    """Answers each question with ``limit`` and ``wait_s``, unless it is ``silent``."""

    def __init__(self, timeout_s: float = 20.0) -> None:
        self.asked: list[str] = []
        self.limit, self.wait_s = "", 0.0
        self.silent = False
        self.calls = RateCalls(self._send, timeout_s)

    def _send(self, message: msgspec.Struct) -> None:
        assert isinstance(message, AskRate)
        self.asked.append(message.key_id)
        if not self.silent:
            answer = RateAnswer(message.call_id, self.limit, self.wait_s)
            asyncio.get_running_loop().call_soon(self.calls.answered, answer)
