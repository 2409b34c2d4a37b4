"""uvicorn for tests: ends when told to."""

from __future__ import annotations

import asyncio
import socket

import uvicorn

_POLL_S = 0.01


class QuickServer(uvicorn.Server):
    """A server without uvicorn's pauses: 0.1 s until the end is noticed, 0.1 s for connections."""

    async def main_loop(self) -> None:
        """Serve until ``should_exit`` is set."""
        await self.on_tick(0)
        while not self.should_exit:
            await asyncio.sleep(_POLL_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End when all connections have ended, at the latest after the configured time."""
        for closed in (*self.servers, *(sockets or ())):
            closed.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
