"""Uvicorn's HTTP protocol with bounds per connection, for both HTTP servers.

Uvicorn bounds only the time between two requests. Without further bounds a connection without a
request, or with an endless head, would stay; a head or the framing of a chunked body could have any
size; and a client that does not read would hold its answer as long as TCP allows.

Parts of HTTP that uvicorn handles otherwise: trailers are refused instead of becoming headers;
``Upgrade`` is ignored (RFC 9110, 7.8) instead of taking the body for another protocol; the host of
an absolute URI replaces ``Host`` (RFC 9112, 3.2.2); and HTTP/1.0 gets no chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httptools
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)
_CHUNK_FRAMING_BYTES = 20  # of a chunk: sixteen digits and two ends of lines
_UPGRADE_HEADERS = frozenset({b"upgrade", b"http2-settings"})

# Idle seconds of a connection, more than the 60 s of common proxies and load balancers: the client
# must be first to close, or a request could arrive at a closed connection.
KEEP_ALIVE_S = 75

_MAX_CHARS = 40


def server_config(app: Any, http: Any, **options: Any) -> uvicorn.Config:
    """Return the configuration of a server whose connections are :class:`BoundedHttp`."""
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        **options,
    )


class Server(uvicorn.Server):
    """Uvicorn without signal handlers: the process handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Unserved(Exception):
    """A request in a form of HTTP that the servers refuse; the text is the reason."""


class BoundedHttp(HttpToolsProtocol, ABC):
    """A connection with bounds, see the module.

    ``head_timeout_s`` bounds the time of the request line and headers. ``max_head_bytes`` bounds a
    head that arrives in several reads, and also what arrives outside of head and body: sizes and
    extensions of chunks beyond ``_CHUNK_FRAMING_BYTES`` for each piece of the body, trailers, and
    empty lines between requests. The event loop bounds one read. While data are unsent, at least
    ``min_sent_bytes`` must be sent in every ``send_timeout_s``, not counting data in the kernel's
    buffer.
    """

    head_timeout_s = 20.0
    max_head_bytes = 64 << 10
    send_timeout_s = 60.0
    min_sent_bytes = 60 << 10

    _is_in_head = False
    _is_in_body = False
    _has_begun = False
    _framing_bytes = 0
    _body_bytes_of_read = 0
    _num_pieces = 0
    _running: RequestResponseCycle | None = None
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
        """End the timers and the running request, which may have pipelined requests behind."""
        self._stop_head_timer()
        self._stop_send_timer()
        self._unset_keepalive_if_required()
        _disconnect(self._running)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and check the size of everything outside of bodies."""
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._has_begun, self._body_bytes_of_read = False, 0
        try:
            self._parse(memoryview(data))
        except httptools.HttpParserError as error:
            reason = error.__context__
            known = str(reason) if isinstance(reason, Unserved) else "The request is not HTTP/1.1."
            self.refuse(HTTPStatus.BAD_REQUEST, known)
        if not self.transport.is_closing():
            self._check_framing(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._has_begun, self._num_pieces = True, True, 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a header.

        Raises:
            Unserved: the field follows a chunked body.
        """
        if not self._is_in_head:
            raise Unserved("Fields after a chunked body (trailers) are not read; leave them out.")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Pass the request on to the application, which bounds the body.

        Raises:
            Unserved: the method is CONNECT.
        """
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise Unserved("This server is no proxy: CONNECT is not served.")
            return  # the head is parsed again without the upgrade
        if not self.url.startswith((b"/", b"*")):
            host = urlsplit(self.url).netloc.rpartition(b"@")[2]
            self.headers[:] = [header for header in self.headers if header[0] != b"host"]
            self.headers.append((b"host", host))
        super().on_headers_complete()
        self._stop_head_timer()
        self._is_in_head, self._is_in_body = False, True

    def on_body(self, body: bytes) -> None:
        self._body_bytes_of_read += len(body)
        self._num_pieces += 1
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            self._is_in_body = False
            super().on_message_complete()

    def pause_writing(self) -> None:
        """Start to check that the client reads."""
        super().pause_writing()
        self._watch_sending()

    def resume_writing(self) -> None:
        self._stop_send_timer()
        super().resume_writing()

    def refuse(self, status: HTTPStatus, message: str) -> None:
        """Close, with an answer unless the application has to answer or has begun to answer."""
        self._stop_head_timer()
        if self._may_answer:
            self.transport.write(self.answer(status, self.refusal(status, message)))
        _disconnect(self._running)
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
        return (self.cycle is None or self.cycle.response_complete) and not self.pipeline

    @property
    def _may_answer(self) -> bool:
        """True if an answer written now is the next answer that the client expects."""
        if self._is_in_body:
            return not (self.pipeline or self.cycle.response_started)
        return self._is_idle

    def _parse(self, data: memoryview) -> None:
        """Parse the data; the parser stops after a head with ``Upgrade``.

        Raises:
            HttpParserError: the data are not HTTP, or :class:`Unserved` is the context.
        """
        while True:
            try:
                return self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self.parser.feed_data(head)

    def _head_without_upgrade(self) -> bytes:
        """Return the head of the present request as bytes, without the fields of an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        kept = [header for header in self.headers if header[0] not in _UPGRADE_HEADERS]
        return b"\r\n".join([*lines, *(b": ".join(header) for header in kept), b"", b""])

    def _check_framing(self, num_bytes: int) -> None:
        """Count a read of ``num_bytes`` outside of bodies; refuse too much, or start the timer."""
        # The first read of a request is not counted: a part may belong to the previous request.
        outside_bytes = self._framing_bytes + num_bytes - self._body_bytes_of_read
        self._framing_bytes = 0 if self._has_begun else outside_bytes
        more_bytes = 0 if self._is_in_head else _CHUNK_FRAMING_BYTES * self._num_pieces
        if self._framing_bytes > self.max_head_bytes + more_bytes:
            self._refuse_framing()
        elif self._is_in_head or (self._is_idle and self.timeout_keep_alive_task is None):
            # The second case: empty lines, or the body of a request that was refused before.
            self._start_head_timer()

    def _refuse_framing(self) -> None:
        if self._is_in_head:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            message = f"The request's headers are larger than {self.max_head_bytes} bytes."
        else:
            status = HTTPStatus.BAD_REQUEST
            message = f"More than {self.max_head_bytes} bytes are neither headers nor body."
        self.refuse(status, message)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        is_old = cycle.scope["http_version"] == "1.0"
        super()._start_asgi_task(cycle, _without_chunks(cycle, app) if is_old else app)

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
                HTTPStatus.REQUEST_TIMEOUT, f"The request's headers did not arrive within {limit}."
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


def _disconnect(cycle: RequestResponseCycle | None) -> None:
    """Let the application of a request see that the client is gone."""
    if cycle is not None and not cycle.response_complete:
        cycle.disconnected = True
        cycle.message_event.set()


def _without_chunks(cycle: RequestResponseCycle, app: Any) -> Any:
    """Return ``app`` for an HTTP/1.0 client: the connection's end ends a body without a length."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        has_length = True

        async def send_unchunked(message: Any) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                names = [name.lower() for name, _ in message.get("headers", ())]
                has_length = b"content-length" in names
                cycle.chunked_encoding = None if has_length else False
            elif not has_length:
                cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await app(scope, receive, send_unchunked)

    return serve


def unread_coding(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the content coding of a request's body, None for a body as it is."""
    for name, value in headers:
        if name == b"content-encoding":
            for coding in value.decode("latin-1").split(","):
                if (found := coding.strip().lower()) not in ("", "identity"):
                    return found[:_MAX_CHARS]
    return None
