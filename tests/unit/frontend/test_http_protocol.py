"""What a connection may hold without a request, at a real server on a local port."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from gpupoold.frontend.errors import send_json
from gpupoold.frontend.server import PublicHttp
from tests.certificates import make_certificate
from tests.raw_http import PATIENCE_S, Connect, http_server

LONG_GET = b"GET /long HTTP/1.1\r\nHost: a\r\n\r\n"
GOOD = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Pair = tuple[Path, Path]

LONG = 64 << 20


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["path"] == "/long":
        await _send_long(send)
        return
    while (await receive()).get("more_body"):
        pass
    await send_json(send, 200, {"path": scope["path"]})


async def _send_long(send: Send) -> None:
    """More than the kernel keeps for a client that does not read."""
    headers = [(b"content-length", str(LONG).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    piece = bytes(1 << 16)
    for left in reversed(range(LONG // len(piece))):
        await send({"type": "http.response.body", "body": piece, "more_body": left > 0})


def _server(**options: Any) -> contextlib.AbstractAsyncContextManager[Connect]:
    return http_server(_app, PublicHttp, **options)


@pytest.mark.parametrize("begin", [b"G", b"GET / HT", GOOD[:-2], GOOD + GOOD[:-1]])
async def test_head_without_an_end_is_given_up_and_idle_connections_are_not(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicHttp, "head_timeout_s", 0.05)
    async with _server() as connect:
        idle, used, slow = [await connect() for _ in range(3)]
        used.writer.write(GOOD)
        assert (await used.answer())[0] == 200
        slow.writer.write(begin)
        if begin.startswith(GOOD):
            assert (await slow.answer())[0] == 200
        status, body = await slow.answer()
        assert status == 408
        assert body["error"]["type"] == "RequestTimeoutError"
        assert await slow.closed()
        for client in (idle, used):
            client.writer.write(GOOD)
            assert (await client.answer())[0] == 200


async def test_slow_body_is_not_the_heads_business(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PublicHttp, "head_timeout_s", 0.02)
    async with _server() as connect:
        client = await connect()
        client.writer.write(b"POST /slow HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n1")
        await asyncio.sleep(0.1)
        client.writer.write(b"2")
        assert await client.answer() == (200, {"path": "/slow"})


async def test_headers_without_an_end_are_refused() -> None:
    async with _server() as connect:
        client = await connect()
        client.writer.write(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(ConnectionError):
            for index in range(10_000):
                client.writer.write(b"X-%d: %s\r\n" % (index, b"y" * 1000))
                await client.writer.drain()
                await asyncio.sleep(0)
                if client.writer.is_closing():
                    break
        with contextlib.suppress(ConnectionError):
            assert (await client.answer())[0] == 431


async def test_large_body_is_no_large_head() -> None:
    body = b"x" * (3 * PublicHttp.max_head_bytes)
    head = b"POST /big HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with _server() as connect:
        client = await connect()
        client.writer.write(head + body + head + body)
        assert [await client.answer() for _ in range(2)] == [(200, {"path": "/big"})] * 2


async def test_connection_that_never_asks_is_closed_in_the_end() -> None:
    async with _server(keep_alive_s=1) as connect:
        silent, used = await connect(), await connect()
        used.writer.write(GOOD)
        assert (await used.answer())[0] == 200
        assert await silent.closed()
        assert await used.closed()


@pytest.mark.parametrize("begin", [b"\r\n", b"\r\n" * 100])
async def test_what_begins_no_request_does_not_keep_a_connection(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PublicHttp, "head_timeout_s", 0.05)
    async with _server() as connect:
        client = await connect()
        client.writer.write(begin)
        assert await client.closed()


async def test_the_body_of_a_refused_request_does_not_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PublicHttp, "head_timeout_s", 0.05)
    async with _server() as connect:
        client = await connect()
        client.writer.write(b"POST /long HTTP/1.1\r\nHost: a\r\nContent-Length: 99\r\n\r\n1")
        await client.reader.readuntil(b"\r\n\r\n")
        await client.reader.readexactly(LONG)
        client.writer.write(b"2")
        assert await client.closed()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A certificate for 127.0.0.1 and its key."""
    return make_certificate(tmp_path_factory.mktemp("tls"))


def _tls(pair: Pair) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of a server and of its clients."""
    certificate, key = pair
    trusting = ssl.create_default_context(cafile=str(certificate))
    return {"ssl_certfile": certificate, "ssl_keyfile": key}, {"ssl": trusting}


def _is_reset(client: socket.socket) -> bool:
    """Return whether the other end has given the connection up."""
    poll = select.poll()
    poll.register(client.fileno(), 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


@pytest.mark.parametrize("is_tls", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize("read_bytes", [0, 1])
async def test_client_that_does_not_read_is_let_go(
    read_bytes: int, is_tls: bool, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor one that reads a byte now and then: its share of the answer is not kept for hours."""
    monkeypatch.setattr(PublicHttp, "send_timeout_s", 0.2)
    options, tls = _tls(pair) if is_tls else ({}, {})
    async with _server(**options) as connect:
        slow, quick = await connect(**tls, limit=1), await connect(**tls)
        slow.writer.write(LONG_GET)
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        quick.writer.write(LONG_GET)
        await quick.reader.readuntil(b"\r\n\r\n")
        assert len(await quick.reader.readexactly(LONG)) == LONG
        raw = slow.writer.get_extra_info("socket")
        num_read = 0
        async with asyncio.timeout(PATIENCE_S):
            while not _is_reset(raw):
                await asyncio.sleep(0.05)
                if read_bytes:
                    num_read += len(os.read(raw.fileno(), read_bytes))
        assert num_read < LONG / 100
        slow.writer.transport.abort()
        quick.writer.write(GOOD)
        assert (await quick.answer())[0] == 200


async def test_client_that_reads_slowly_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as it takes 60 KB in every ``send_timeout_s``."""
    monkeypatch.setattr(PublicHttp, "send_timeout_s", 0.5)
    monkeypatch.setattr(PublicHttp, "min_sent_bytes", 1)
    async with _server() as connect:
        client = await connect()
        client.writer.write(LONG_GET)
        await client.reader.readuntil(b"\r\n\r\n")
        left = LONG
        while left:
            left -= len(await client.reader.readexactly(min(left, 8 << 20)))
            await asyncio.sleep(0.1)
        client.writer.write(GOOD)
        assert (await client.answer())[0] == 200


async def test_handshake_that_does_not_go_on_is_given_up(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncio.constants.SSL_HANDSHAKE_TIMEOUT", 0.2)
    options, tls = _tls(pair)
    async with _server(**options) as connect:
        silent, begun = await connect(), await connect()
        begun.writer.write(b"\x16\x03\x01\x02\x00")  # a record of 512 bytes is to come
        quick = await connect(**tls)
        quick.writer.write(GOOD)
        assert (await quick.answer())[0] == 200
        assert await silent.closed()
        assert await begun.closed()
