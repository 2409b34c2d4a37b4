"""The daemon's metrics on the frontend's port, requested over the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from gpupoold.frontend.errors import RETRY_STARTING_S, ApiError, Send
from gpupoold.wire.messages import AskMetrics, MetricsText

_CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT_S = 5.0


class MetricsCalls:
    """Requests to the daemon; concurrent callers share one answer."""

    def __init__(
        self, send: Callable[[msgspec.Struct], None], timeout_s: float = _TIMEOUT_S
    ) -> None:
        self._send = send
        self._timeout_s = timeout_s
        self._next_call = 0
        self._asked: asyncio.Future[bytes | None] | None = None

    def answered(self, message: MetricsText) -> None:
        """Handle the daemon's answer; ignore a late one."""
        if message.call_id == self._next_call and self._asked is not None:
            _settle(self._asked, message.text)

    async def text(self) -> bytes:
        """Return the daemon's text.

        Raises:
            ApiError: 503; the daemon does not answer in time.
        """
        if self._asked is None or self._asked.done():
            self._asked = self._ask()
        text = await asyncio.shield(self._asked)
        if text is None:
            late = "The daemon has not sent its metrics in time."
            raise ApiError(503, late, retry_after_s=RETRY_STARTING_S)
        return text

    def _ask(self) -> asyncio.Future[bytes | None]:
        """The answer, None if there is none in time."""
        self._next_call += 1
        loop = asyncio.get_running_loop()
        asked: asyncio.Future[bytes | None] = loop.create_future()
        too_late = loop.call_later(self._timeout_s, _settle, asked, None)
        asked.add_done_callback(lambda _: too_late.cancel())
        self._send(AskMetrics(self._next_call))
        return asked

    async def serve(self, send: Send, *, with_body: bool) -> None:
        """Answer a ``GET``, or without the body a ``HEAD``, of ``/metrics``."""
        text = await self.text()
        length = (b"content-length", str(len(text)).encode())
        headers = [(b"content-type", _CONTENT_TYPE), length]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text if with_body else b""})


def _settle(asked: asyncio.Future[bytes | None], text: bytes | None) -> None:
    if not asked.done():
        asked.set_result(text)
