"""Questions to the daemon over the wire: its metrics, and whether a request may begin."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from starlette.types import Send

from gpupoold.frontend.errors import RETRY_STARTING_S, ApiError, over_rate
from gpupoold.units import format_duration
from gpupoold.wire.messages import AskMetrics, AskRate, KeyRecord, MetricsText, RateAnswer

A = TypeVar("A", MetricsText, RateAnswer)

_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT_S = 5.0


class DaemonCalls(Generic[A]):
    """Questions with numbers, each answered once; lives on the event loop."""

    def __init__(
        self, send: Callable[[msgspec.Struct], None], timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._next_call = 0
        self._asked: dict[int, asyncio.Future[A]] = {}

    def answered(self, message: A) -> None:
        """Handle the daemon's answer; ignore a late one."""
        asked = self._asked.get(message.call_id)
        if asked is not None and not asked.done():
            asked.set_result(message)

    async def ask(self, question: Callable[[int], msgspec.Struct], late: str) -> A:
        """Return the answer to the question of a number.

        Raises ApiError: 503 with the text ``late``; the daemon does not answer in time.
        """
        self._next_call += 1
        call_id = self._next_call
        asked: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked[call_id] = asked
        self._send(question(call_id))
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asked
        except TimeoutError:
            raise ApiError(503, late, retry_after_s=RETRY_STARTING_S) from None
        finally:
            del self._asked[call_id]


class RateCalls(DaemonCalls[RateAnswer]):
    """Asks whether a request with a key may begin."""

    async def begin(self, key: KeyRecord) -> None:
        """Return when the daemon has counted a request with this key.

        Raises ApiError: 429: too many requests or tokens in too short a time; 503: the daemon does
        not answer in time.
        """
        late = "The daemon has not confirmed the limits of this API key in time."
        answer = await self.ask(lambda call_id: AskRate(call_id, key.id), late)
        if answer.wait_s:
            raise over_rate(
                f"Rate limit reached for the API key `{key.name}`: {answer.limit}. "
                f"Try again in {format_duration(answer.wait_s)}.",
                answer.wait_s,
            )


class MetricsCalls(DaemonCalls[MetricsText]):
    """Asks for the metrics; concurrent callers share one answer."""

    _shared: asyncio.Task[MetricsText] | None = None

    async def text(self) -> bytes:
        """Return the daemon's text. Raises ApiError: 503; the daemon does not answer in time."""
        if self._shared is None or self._shared.done():
            late = "The daemon has not sent its metrics in time."
            self._shared = asyncio.create_task(self.ask(AskMetrics, late))
            # Retrieved, so that asyncio does not warn after all callers have left.
            self._shared.add_done_callback(lambda task: task.cancelled() or task.exception())
        return (await asyncio.shield(self._shared)).text

    async def serve(self, send: Send, *, with_body: bool) -> None:
        """Answer a ``GET``, or without the body a ``HEAD``, of ``/metrics``."""
        text = await self.text()
        length = (b"content-length", str(len(text)).encode())
        headers = [(b"content-type", _CONTENT_TYPE), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text if with_body else b""})
