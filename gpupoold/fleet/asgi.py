"""Bodies, headers and answers of the entrance's HTTP, by ASGI, and answers relayed from nodes."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from gpupoold.access.fleet import HEADER
from gpupoold.wire.continuation import CONTINUES_HEADER, TOKENS_COMMENT, Continuation, OutputSoFar

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 << 20
MAX_ANSWER_BYTES = 256 << 20
"""Limit of an answer that is no stream; 2,048 embeddings of 4,096 numbers take 170 MB."""
_DROPPED = frozenset(
    (b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding")
) | {HEADER.encode(), CONTINUES_HEADER.encode()}

MAX_EVENT_BYTES = 16 << 20
MAX_OUTPUTS = 1 << 10
MAX_TOKENS = 1 << 21
"""Limit of the tokens of a stream that are kept, of all samples."""
DATA = b"data: "
_TOKENS = f": {TOKENS_COMMENT} ".encode()


class ClientGone(Exception):
    """The client has left before the end of the answer."""


@contextlib.asynccontextmanager
async def until_gone(receive: Receive) -> AsyncIterator[asyncio.Event]:
    """Yield an event, set when the client leaves; the body must have been read."""
    gone, serving = asyncio.Event(), asyncio.current_task()
    assert serving is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        gone.set()
        serving.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield gone
    except asyncio.CancelledError:
        if not gone.is_set():
            raise
        raise ClientGone from None
    finally:
        watching.cancel()


async def read_body(receive: Receive, send: Send, hold: Callable[[int], bool]) -> bytes | None:
    """Return a body; None after a refusal. ``hold`` is asked for each part's bytes.

    Raises:
        ClientGone: the client has left.
    """
    parts, num_bytes = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        parts.append(message.get("body", b""))
        num_bytes += len(parts[-1])
        if num_bytes > MAX_BODY_BYTES:
            await send_error(send, 413, f"The body has more than {MAX_BODY_BYTES:,} bytes.")
            return None
        if not hold(len(parts[-1])):
            text = "The bodies of other requests need all memory of the entrance."
            await send_error(send, 429, text, [(b"retry-after", b"1")])
            return None
        if not message.get("more_body"):
            return b"".join(parts)


async def read_answer(answer: aiohttp.ClientResponse) -> bytes:
    """Return the body of a node's answer.

    Raises:
        ValueError: the body is too long.
    """
    body = bytearray()
    async for part in answer.content.iter_any():
        body += part
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
    return bytes(body)


def passed_on(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in _DROPPED]


def as_text(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[str, str]]:
    return [(name.decode("latin-1"), value.decode("latin-1")) for name, value in headers]


def headers_of(answer: aiohttp.ClientResponse) -> list[tuple[bytes, bytes]]:
    return passed_on(answer.raw_headers)


async def send_start(
    send: Send, status: int, headers: Iterable[tuple[bytes, bytes]], node: str = ""
) -> None:
    """Send status and headers; ``node`` is the node that answers, empty for the entrance."""
    headers = [*headers, *([(b"x-gpupool-node", node.encode())] if node else ())]
    await send({"type": "http.response.start", "status": status, "headers": headers})


async def send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


async def send_whole(
    send: Send,
    status: int,
    headers: Iterable[tuple[bytes, bytes]],
    body: bytes,
    node: str = "",
    *,
    with_body: bool = True,
) -> None:
    """Send an answer, or only its headers."""
    await send_start(send, status, [*headers, (b"content-length", b"%d" % len(body))], node)
    await send_body(send, body if with_body else b"", more=False)


async def send_json(send: Send, status: int, value: object, *, with_body: bool = True) -> None:
    """Send a JSON answer, or only its headers."""
    body, headers = msgspec.json.encode(value), [(b"content-type", b"application/json")]
    await send_whole(send, status, headers, body, with_body=with_body)


async def send_error(
    send: Send, status: int, text: str, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    body = error_body(status, text)
    await send_whole(send, status, [(b"content-type", b"application/json"), *headers], body)


def error_body(status: int, text: str) -> bytes:
    kind = HTTPStatus(status).phrase
    error = {"message": text, "type": kind, "param": None, "code": status}
    return msgspec.json.encode({"error": error})


class Relay(ABC):
    """One stream of events; ``feed`` takes a node's bytes and returns the client's.

    A subclass for each form of events knows what the client has.

    Comments of the node have the ids of the answer's tokens. A continuation repeats the events of
    these tokens; the relay drops what the client has. The text of a token reaches the client after
    the comment, never before, so no text is missing.
    """

    def __init__(self) -> None:
        self.is_complete = False
        """True when the client has the end of the stream."""
        self.lost = b""
        """The node's last event if the node gave the answer up, else empty; held back."""
        self._is_continued = False
        self._outputs: defaultdict[int, OutputSoFar] = defaultdict(OutputSoFar)
        self._num_tokens = 0
        self._rest = bytearray()

    @property
    @abstractmethod
    def has_begun(self) -> bool:
        """True if the client has a part of the answer."""

    @property
    def can_continue(self) -> bool:
        """False if the answer so far has parts that a continuation could not repeat."""
        return True

    @abstractmethod
    def ending(self, text: str) -> bytes:
        """Return the events that tell the client of an error of code 503."""

    @abstractmethod
    def _passed(self, event: bytes) -> bytes:
        """Return the bytes of an event for the client, empty for what the client has.

        Raises:
            ValueError: the event has another form.
        """

    def _num_kept(self, _: int) -> int | None:
        """Return the number of tokens of a sample to continue after, None for all tokens."""
        return None

    def outputs(self) -> list[OutputSoFar]:
        """Return the samples to continue, without samples at the end that have no tokens."""
        found = [self._kept(number) for number in range(max(self._outputs, default=-1) + 1)]
        while found and not found[-1].token_ids:
            found.pop()
        return found

    def continuation(self, request: bytes) -> bytes:
        """Return the body of the request to continue after the tokens so far."""
        return msgspec.json.encode(Continuation(msgspec.Raw(request), self.outputs()))

    def begin_again(self) -> None:
        """Expect bytes of a different node, from the beginning of the answer."""
        self._rest, self.lost = bytearray(), b""
        self._outputs = defaultdict(OutputSoFar, enumerate(self.outputs()))
        self._is_continued = self.has_begun

    def feed(self, received: bytes) -> bytes:
        """Return the bytes for the client.

        Raises:
            ValueError: an event is too long, or has another form than the protocol's.
        """
        searched = max(0, len(self._rest) - 1)
        self._rest += received
        events: list[bytes] = []
        if self._rest.find(b"\n\n", searched) >= 0:
            *events, rest = bytes(self._rest).split(b"\n\n")
            self._rest = bytearray(rest)
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of a node has more than {MAX_EVENT_BYTES:,} bytes")
        return b"".join(map(self._told, events))

    def _told(self, event: bytes) -> bytes:
        if event.startswith(_TOKENS):
            self._note_tokens(event[len(_TOKENS) :].decode())
            return b""
        return event + b"\n\n" if event.startswith(b":") else self._passed(event)

    def _note_tokens(self, comment: str) -> None:
        number, ids, *reason = comment.split(" ")
        if not 0 <= int(number) < MAX_OUTPUTS:
            raise ValueError(f"a node tells tokens of sample {number}")
        output = self._outputs[int(number)]
        token_ids = [int(one) for one in ids.split(",")]
        self._num_tokens += len(token_ids)
        if self._num_tokens > MAX_TOKENS:
            raise ValueError(f"a node tells more than {MAX_TOKENS:,} tokens")
        output.token_ids += token_ids
        output.finish_reason = (reason and reason[0]) or None

    def _kept(self, number: int) -> OutputSoFar:
        output = self._outputs.get(number) or OutputSoFar()
        num_kept = self._num_kept(number)
        if num_kept is None or num_kept >= len(output.token_ids):
            return output
        return OutputSoFar(output.token_ids[:num_kept])
