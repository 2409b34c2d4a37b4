"""The end of a frontend's HTTP server, at a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpupoold.frontend.server import HttpServer, http_config, refuse_stopping
from tests.raw_http import PATIENCE_S, Client

GET = b"GET /v1/models HTTP/1.1\r\nHost: a\r\n\r\n"


class Streaming:
    """An application and its server, with a stream that ends when the test says so."""

    def __init__(self, *, refuses: bool) -> None:
        self.refuses = refuses
        self.may_end = asyncio.Event()
        self.accepting = asyncio.Event()
        refusing = http_config(refuse_stopping, None) if refuses else None
        self.server = HttpServer(http_config(self, None), self.accepting.set, refusing)
        self._address: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.scope = scope
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"first", "more_body": True})
        await self.may_end.wait()
        await send({"type": "http.response.body", "body": b"last"})

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[socket.socket]:
        with socket.create_server(("127.0.0.1", 0)) as kept:  # by the daemon
            kept.setblocking(False)
            self._address = kept.getsockname()
            serving = asyncio.create_task(self.server.serve([kept.dup()]))
            await self.accepting.wait()
            yield kept
            self.may_end.set()
            async with asyncio.timeout(PATIENCE_S):
                await serving

    @contextlib.asynccontextmanager
    async def connected(self, sent: bytes) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection(*self._address)
        writer.write(sent)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()

    async def stop(self) -> None:
        """Begin to stop; return when the server accepts no more."""
        self.server.should_exit = True
        async with asyncio.timeout(PATIENCE_S):
            while any(one.is_serving() for one in self.server.servers):
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("body", [b"", b"x" * 5_000_000])
@pytest.mark.parametrize("refuses", [True, False])
async def test_connections_while_a_stream_ends(refuses: bool, body: bytes) -> None:
    """503 from a server's own socket; the socket that systemd keeps lets clients wait."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % len(body)
    streaming = Streaming(refuses=refuses)
    async with streaming.serving() as kept, streaming.connected(GET) as client:
        await client.reader.readuntil(b"first")
        await streaming.stop()
        async with streaming.connected(b""), streaming.connected(head + body) as other:
            if refuses:
                answer, _, content = (await other.all()).partition(b"\r\n\r\n")
                assert answer.startswith(b"HTTP/1.1 503 ")
                assert b"retry-after: 10" in answer
                assert json.loads(content)["error"]["message"] == "the server is stopping"
            else:
                for _ in range(2):
                    connection, _ = await asyncio.get_running_loop().sock_accept(kept)
                    connection.close()
            streaming.may_end.set()
            assert b"last" in await client.all()


@pytest.mark.parametrize("begun", [b"", GET[:20]])
async def test_a_connection_made_before_the_end_is_answered_too(begun: bytes) -> None:
    """A client whose request was on its way would else read a closed connection."""
    streaming = Streaming(refuses=True)
    async with streaming.serving(), streaming.connected(GET) as client:
        await client.reader.readuntil(b"first")
        async with streaming.connected(begun) as early:
            while len(streaming.server.server_state.connections) < 2:
                await asyncio.sleep(0.01)
            await streaming.stop()
            early.writer.write(GET[len(begun) :])
            assert (await early.all()).startswith(b"HTTP/1.1 503 ")
            streaming.may_end.set()
            assert b"last" in await client.all()


async def test_headers_of_proxies_are_ignored() -> None:
    """A client on this machine could claim any address."""
    streaming = Streaming(refuses=False)
    claims = b"X-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\n\r\n"
    async with streaming.serving(), streaming.connected(GET[:-2] + claims) as client:
        await client.reader.readuntil(b"first")
        assert streaming.scope["client"][0] == "127.0.0.1"
        assert streaming.scope["scheme"] == "http"
        streaming.server.should_exit = True
        streaming.may_end.set()
        assert b"last" in await client.all()
