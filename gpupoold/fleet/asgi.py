"""Bodies, headers and answers of the entrance's HTTP, by ASGI."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec

from gpupoold.access.fleet import HEADER
from gpupoold.wire.continuation import CONTINUES_HEADER

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 << 20
MAX_ANSWER_BYTES = 256 << 20
"""Limit of an answer that is no stream; 2,048 embeddings of 4,096 numbers take 170 MB."""
_DROPPED = frozenset(
    (b"connection", b"content-length", b"host", b"keep-alive", b"transfer-encoding")
) | {HEADER.encode(), CONTINUES_HEADER.encode()}


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

    Raises ClientGone: the client has left.
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
    """Return the body of a node's answer. Raises ValueError: the body is too long."""
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
