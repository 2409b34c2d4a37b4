"""A real HTTP server on a local port, and clients that send bytes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import uvicorn

from tests.support.quick_server import QuickServer

Connect = Callable[..., Awaitable["Client"]]
# Nothing here may take so long, on however busy a machine.
PATIENCE_S = 60


@contextlib.asynccontextmanager
async def http_server(
    app: Any, protocol: type[asyncio.Protocol], keep_alive_s: int = 60, **options: Any
) -> AsyncIterator[Connect]:
    """Serve ``app``; connections to the server are closed at the end."""
    config = uvicorn.Config(
        app, port=0, http=protocol, lifespan="off", log_config=None,
        timeout_keep_alive=keep_alive_s, **options,
    )  # fmt: skip
    server = QuickServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    clients: list[Client] = []

    async def connect(**tls: Any) -> Client:
        clients.append(Client(*await asyncio.open_connection("127.0.0.1", port, **tls)))
        return clients[-1]

    try:
        yield connect
    finally:
        for client in clients:
            client.writer.close()
            with contextlib.suppress(ConnectionError, ssl.SSLError):
                await client.writer.wait_closed()
        server.should_exit = server.force_exit = True
        await serving


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = self._reader = reader
        self.writer = writer

    async def answer(self) -> tuple[int, Any]:
        """Status and body of the next answer."""
        async with asyncio.timeout(PATIENCE_S):
            head = await self._reader.readuntil(b"\r\n\r\n")
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            return int(head.split()[1]), json.loads(await self._reader.readexactly(length))

    async def closed(self) -> bool:
        """Return whether the server closes without another word."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read(1) == b""

    async def all(self) -> bytes:
        """Return all bytes until the server closes."""
        async with asyncio.timeout(PATIENCE_S):
            return await self._reader.read()

    async def send(self, piece: bytes, max_bytes: int) -> int:
        """Send ``piece`` again and again until the server closes; return the bytes sent."""
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while num_bytes < max_bytes and not self.writer.is_closing():
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(0)
                num_bytes += len(piece)
        return num_bytes
