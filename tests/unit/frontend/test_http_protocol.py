"""What a connection may hold without a request, at a real server on a local port."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import uvicorn

from gpupoold.frontend import http_protocol
from gpupoold.frontend.errors import send_json
from gpupoold.frontend.http_protocol import BoundedHttp
from gpupoold.frontend.mounts import Receive, Scope, Send

GOOD = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
Connect = Callable[[], Awaitable["Client"]]
# Nothing here may take so long, on however busy a machine.
PATIENCE_S = 60


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    while (await receive()).get("more_body"):
        pass
    await send_json(send, 200, {"path": scope["path"]})


@contextlib.asynccontextmanager
async def _server(keep_alive_s: int = 60) -> AsyncIterator[Connect]:
    """A server; connections to it are closed at the end."""
    config = uvicorn.Config(
        _app, port=0, http=BoundedHttp, lifespan="off", log_config=None,
        timeout_keep_alive=keep_alive_s,
    )  # fmt: skip
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    clients: list[Client] = []

    async def connect() -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port)))
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError):
                await client.writer.wait_closed()
        server.should_exit = True
        await serving


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, Any]:
        """Status and body of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def closed(self) -> bool:
        """Whether the server closes without another word."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read(1) == b""


@pytest.mark.parametrize("begin", [b"G", b"GET / HT", GOOD[:-2], GOOD + GOOD[:-1]])
async def test_head_without_an_end_is_given_up_and_idle_connections_are_not(
    begin: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.05)
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
    monkeypatch.setattr(http_protocol, "HEAD_TIMEOUT_S", 0.02)
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
    body = b"x" * (3 * http_protocol.MAX_HEAD_BYTES)
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
