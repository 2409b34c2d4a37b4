"""Uvicorn's HTTP protocol with bounds per connection, for both HTTP servers.

Uvicorn bounds only the time between two requests. Without further bounds a connection without a
request, or with an endless head, would stay; a head could have any size; and a client that does not
read would hold its answer as long as TCP allows.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from abc import ABC, abstractmethod
from http import HTTPStatus

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)

KEEP_ALIVE_S = 75
"""Idle time of a connection in seconds.

The value exceeds the 60 s of common proxies and load balancers: the client must be first to close,
or a request could arrive at a closed connection.
"""


class BoundedHttp(HttpToolsProtocol, ABC):
    """A connection with bounds, see the module.

    ``head_timeout_s`` bounds the time of the request line and headers. ``max_head_bytes`` bounds a
    head that arrives in several reads; the event loop bounds one read. While data are unsent, at
    least ``min_sent_bytes`` must be sent in every ``send_timeout_s``, not counting data in the
    kernel's buffer.
    """

    head_timeout_s = 20.0
    max_head_bytes = 64 << 10
    send_timeout_s = 60.0
    min_sent_bytes = 60 << 10

    _is_in_head = False
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None
    _unsent_bytes = 0

    @abstractmethod
    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        """Return the JSON body that explains the end of the connection."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit for the first request."""
        super().connection_made(transport)
        # Writing pauses as soon as the kernel does not take all bytes, so every unsent byte is
        # watched. (A mark of 0 would pause TLS for ever.)
        transport.set_write_buffer_limits(high=1, low=0)
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, then check the size of the head or of the malformed request."""
        was_in_head = self._is_in_head
        super().data_received(data)
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        if not self._is_in_head:
            # Empty lines before a request, or the body of a request that was refused before.
            if self._is_idle and self.timeout_keep_alive_task is None:
                self._start_head_timer()
            return
        # The first read of a head is not counted: a part may belong to the previous request.
        self._head_bytes += len(data) if was_in_head else 0
        if self._head_bytes > self.max_head_bytes:
            self.refuse(
                HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                f"The request's headers are larger than {self.max_head_bytes} bytes.",
            )
        else:
            self._start_head_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        """Pass the request on to the application, which bounds the body."""
        self._is_in_head = False
        self._stop_head_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """Start to check that the client reads."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer without the application, and close."""
        self._stop_head_timer()
        self.transport.write(self.answer(status, self.refusal(status, message)))
        self.transport.close()

    def answer(self, status: HTTPStatus, content: dict[str, object]) -> bytes:
        """Return the last answer of a connection as bytes."""
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status.value} {status.phrase}\r\nconnection: close\r\n"
        if status is HTTPStatus.SERVICE_UNAVAILABLE:
            head += "retry-after: 1\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        return head.encode() + body

    @property
    def _is_idle(self) -> bool:
        """True if no request is being answered."""
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout_s, self._end_head_timeout)

    def _end_head_timeout(self) -> None:
        self._head_timer = None
        if self.transport.is_closing():
            return
        if self._is_in_head:
            limit = f"{self.head_timeout_s:g} s"
            self.refuse(
                HTTPStatus.REQUEST_TIMEOUT,
                f"The request's headers did not arrive within {limit}.",
            )
        elif self._is_idle:
            self.transport.close()

    def _watch_sending(self) -> None:
        self._stop_send_timer()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._send_timer = self.loop.call_later(self.send_timeout_s, self._check_sending)

    def _check_sending(self) -> None:
        self._send_timer = None
        if self.transport.get_write_buffer_size() > self._unsent_bytes - self.min_sent_bytes:
            # Reset, or the kernel would keep the unsent bytes for minutes.
            self.transport.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE
            )
            self.transport.abort()
        else:
            self._watch_sending()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None
