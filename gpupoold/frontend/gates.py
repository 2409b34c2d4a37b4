"""Gates hold answers back until the daemon has admitted the requests behind them.

A model's API begins to stream before its engine has the request, so a refusal would come after "200
OK". The gate of an HTTP request keeps the API's output until the daemon has answered; after a
refusal the client gets the refusal instead.

A gate's requests (several for ``n`` > 1 or a list of prompts) find the gate by the context of the
API's task, which new tasks inherit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterable, MutableMapping
from contextvars import ContextVar
from http import HTTPStatus
from typing import Any

from gpupoold.frontend.errors import ApiError, not_admitted, not_understood
from gpupoold.frontend.mounts import Send
from gpupoold.frontend.waiting import WaitComments
from gpupoold.wire.messages import AdmissionAnswer

_logger = logging.getLogger(__name__)
# Seconds after which a client may repeat a request that a stopping server has ended. Connections
# wait in the socket until the server has started again.
_RETRY_AFTER = b"1"
_current: ContextVar[Gate | None] = ContextVar("gate", default=None)


class Gate:
    """Holds one answer back; ``send`` is for the model's API."""

    def __init__(
        self,
        send: Send,
        is_stopping: Callable[[], bool] = lambda: False,
        *,
        wants_comments: bool = False,
    ) -> None:
        self.wants_comments = wants_comments
        self._client_send = send
        self._is_stopping = is_stopping
        self._request_ids: list[str] = []
        self._num_unanswered = 0
        self._is_open = False
        self._is_passing = False
        self._held: list[MutableMapping[str, Any]] = []
        self._sending = asyncio.Lock()
        self._opening: asyncio.Task[None] | None = None
        self._is_event_stream = False  # and has begun
        self._commenting: asyncio.Task[None] | None = None
        self.refusal: ApiError | None = None

    @property
    def is_untouched(self) -> bool:
        """True if the daemon got no request and the client no output."""
        return not self._request_ids and not self._is_open

    @property
    def request_ids(self) -> list[str]:
        """The ids of the answer's requests."""
        return self._request_ids

    @property
    def has_begun(self) -> bool:
        """True if the client gets the API's output."""
        return self._is_open

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Pass on a message of the answer, or keep it; drop it after a refusal."""
        if self.refusal is not None:
            return
        if message.get("status") == HTTPStatus.SERVICE_UNAVAILABLE and self._is_stopping():
            headers = [*message.get("headers", ()), (b"retry-after", _RETRY_AFTER)]
            message = {**message, "headers": headers}
        if self._is_passing:
            await self._send_now(message)
            return
        self._held.append(message)
        if not message.get("more_body") and message["type"] == "http.response.body":
            self._is_open = True  # a complete answer needs no further message
        if self._is_open:
            await self._flush()

    def comment(self, text: str) -> None:
        """Send a comment to a client that reads server-sent events, after the answer's headers.

        The comment is dropped while an earlier one is being sent, because the client reads slowly.
        The server writes each message of an answer as a whole.
        """
        is_sending = self._commenting is not None and not self._commenting.done()
        if self.wants_comments and self._is_event_stream and not is_sending:
            self._commenting = asyncio.create_task(self._send_comment(text))

    async def _send_comment(self, text: str) -> None:
        if not self._is_event_stream:  # the answer has ended meanwhile
            return
        body = f": {text}\n\n".encode()
        with contextlib.suppress(OSError):  # the client has left, and the API learns of it too
            await self._client_send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_now(self, message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            await self._client_send(message)
            self._is_event_stream = _has_events(message.get("headers", ()))
            return
        if not message.get("more_body"):
            self._is_event_stream = False
        await self._client_send(message)

    async def settle(self) -> None:
        """Return when all output has been sent, after the API's end.

        Raises:
            ApiError: the request was refused; no output has been sent.
        """
        if self._opening is not None:
            await self._opening
        if self.refusal is not None:
            raise self.refusal

    def asked(self, request_id: str) -> None:
        """The daemon is asked to take a request for this answer."""
        self._request_ids.append(request_id)
        self._num_unanswered += 1

    def answered(self, message: AdmissionAnswer) -> list[str]:
        """Handle the daemon's answer; return the requests to end after a refusal."""
        self._num_unanswered -= 1
        if self.refusal is None:
            if message.status == HTTPStatus.OK:
                if not self._num_unanswered and not self._is_open:
                    self._is_open = True
                    self._opening = asyncio.create_task(self._flush())
                return []
            if self._is_open:
                return [message.request_id]
            self.refusal = not_admitted(message)
        return self._request_ids

    async def _flush(self) -> None:
        async with self._sending:
            while self._held:
                await self._send_now(self._held.pop(0))
            # No earlier message is left for a later message to overtake.
            self._is_passing = True


def _has_events(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream")
        for name, value in headers
    )


def refuse(error: ApiError) -> None:
    """Answer with ``error`` instead of the API's output, unless the answer has begun."""
    gate = _current.get()
    if gate is not None and not gate.has_begun and gate.refusal is None:
        gate.refusal = error


def has_asked() -> bool:
    """Return whether the daemon has been asked for anything for the answer being made."""
    gate = _current.get()
    return gate is not None and not gate.is_untouched


class Gates:
    """The gates of all waiting answers; for the event loop."""

    def __init__(self, waits: WaitComments) -> None:
        self._waits = waits
        self._waiting: dict[str, Gate] = {}
        self._is_stopping = False

    def stop(self) -> None:
        """Add ``Retry-After`` to each 503 of an API from now on, because the server stops."""
        self._is_stopping = True

    @contextlib.asynccontextmanager
    async def holding(self, send: Send, *, wants_comments: bool) -> AsyncIterator[Gate]:
        """Create a gate for the context and its tasks.

        ``wants_comments``: a waiting stream gets comments.

        Raises:
            ApiError: at the end, without any output: a request was refused, or the API failed
                before adding a request, which is the request's fault.
        """
        gate = Gate(send, lambda: self._is_stopping, wants_comments=wants_comments)
        token = _current.set(gate)
        try:
            yield gate
        except Exception as error:
            if gate.is_untouched:
                _logger.info("an API failed before adding a request", exc_info=error)
                raise not_understood(error) from error
            if gate.refusal is None:
                raise
        finally:
            _current.reset(token)
            self._waits.end(gate.request_ids)
        await gate.settle()

    def asked(self, request_id: str) -> None:
        """The daemon is going to be asked to take a request."""
        gate = _current.get()
        if gate is not None:
            gate.asked(request_id)
            self._waiting[request_id] = gate

    def answered(self, message: AdmissionAnswer) -> list[str]:
        """Handle the daemon's answer; return the requests to end after a refusal."""
        gate = self._waiting.pop(message.request_id, None)
        if gate is not None:
            if gate.wants_comments and message.status == HTTPStatus.OK:
                self._waits.begin(message.request_id, gate)
            return gate.answered(message)
        return [] if message.status == HTTPStatus.OK else [message.request_id]
