"""Uvicorn's HTTP protocol with bounds on what a connection may hold without a request.

Uvicorn bounds the time between two requests only. A connection that never sends one, or the
beginning of one for ever, would stay, and a request's head may be of any size.
"""

from __future__ import annotations

import asyncio
import json
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gpupoold.frontend.errors import ApiError, head_too_large, head_too_slow

KEEP_ALIVE_S = 75
"""How long a connection may be idle. Longer than the 60 s after which common proxies and load
balancers let go of theirs: the end that closes first must not be the one that is sent to."""

HEAD_TIMEOUT_S = 20.0
"""How long the request line and the headers may take."""

MAX_HEAD_BYTES = 64 << 10
"""Of a head that comes in more than one read; one read is bounded by the event loop."""


class BoundedHttp(HttpToolsProtocol):
    """One connection; see the module."""

    _is_in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a first request as long as for another one."""
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timers."""
        self._stop_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse it; then see whether the head has become too long."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if not self._is_in_head or self.transport.is_closing():
            return
        # Of the read with which it began a part may belong to the request before.
        self._head_bytes += len(data) if was_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(head_too_large(MAX_HEAD_BYTES))
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._give_up)

    def on_message_begin(self) -> None:
        """A request begins."""
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """The application has it now, and bounds its body."""
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()

    def _give_up(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self._refuse(head_too_slow(HEAD_TIMEOUT_S))

    def _refuse(self, error: ApiError) -> None:
        self._stop_timer()
        body = json.dumps(error.body()).encode()
        status = HTTPStatus(error.status)
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
