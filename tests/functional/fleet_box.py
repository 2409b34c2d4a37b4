"""A fleet without Ray: daemons, agents, the controller and an entrance, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import uvicorn

from benchmarks.private_daemon import PrivateDaemon
from gpupoold.access.fleet import make_secret
from gpupoold.fleet.agent import Agent
from gpupoold.fleet.controller import Controller
from gpupoold.fleet.entrance import Entrance
from tests.support.quick_server import QuickServer

_PUBLISHES_EVERY_S = 0.1


class LocalFleet:
    """The parts of a running fleet; ``url`` is the entrance's."""

    def __init__(self, daemons: Mapping[str, PrivateDaemon], folder: Path) -> None:
        self.daemons = daemons
        self.agents = {name: Agent(one.socket_path) for name, one in daemons.items()}
        self.controller = Controller(folder, self.agents.__getitem__)
        self.entrance = Entrance()
        self.url = ""

    async def join(self) -> None:
        """Let all daemons join."""
        secret = make_secret()
        for name, agent in self.agents.items():
            report = await agent.join(secret)
            self.controller.join(name, report.http_url, secret)

    async def publish(self) -> None:
        """Tell the entrance what the controller knows, again and again."""
        while True:
            self.entrance.replace(self.controller.table)
            await asyncio.sleep(_PUBLISHES_EVERY_S)


@contextlib.asynccontextmanager
async def local_fleet(
    daemons: Mapping[str, PrivateDaemon], folder: Path
) -> AsyncIterator[LocalFleet]:
    """A running fleet of these daemons."""
    fleet = LocalFleet(daemons, folder)
    await fleet.join()
    await fleet.entrance.start()
    listener = socket.create_server(("127.0.0.1", 0))
    fleet.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(fleet.entrance, log_config=None, lifespan="off")
    server = QuickServer(config)
    tasks = [asyncio.create_task(fleet.controller.run()), asyncio.create_task(fleet.publish())]
    serving = asyncio.create_task(server._serve([listener]))
    try:
        yield fleet
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        server.force_exit = server.should_exit = True
        await serving
        listener.close()
        await fleet.entrance.close()
        for agent in fleet.agents.values():
            agent.close()
