"""The frontends: processes that accept on the daemon's one listening socket.

The frontends share the socket's queue: a connection that one frontend does not accept, because the
frontend has died or hangs, is accepted by another. (With one socket per frontend, ``SO_REUSEPORT``,
connections in the queue of a dead process would be lost.)
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator

from gpupoold.config.schema import Settings
from gpupoold.control.frontends.frontend import Frontend
from gpupoold.control.processes.crash_attribution import Death
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.handlers import Handlers
from gpupoold.control.processes.reconfigure import reconfigure
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class Frontends:
    """All frontends by number; one object per daemon."""

    def __init__(self, settings: Settings, forks: ForkServer, listener: socket.socket) -> None:
        self._settings = settings
        self._handlers: Handlers[Frontend, m.FromFrontend] | None = None
        self._metrics_text: Callable[[], Awaitable[bytes]] | None = None
        self._all = [
            Frontend(number, settings, forks, listener, self)
            for number in range(settings.server.frontends)
        ]

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._all)

    @property
    def any_ready(self) -> bool:
        """True if any frontend accepts connections."""
        return any(one.is_ready for one in self._all)

    def start(
        self,
        handlers: Handlers[Frontend, m.FromFrontend],
        metrics_text: Callable[[], Awaitable[bytes]],
    ) -> None:
        """Start all processes; ``metrics_text`` returns the text for ``/metrics``."""
        self._handlers, self._metrics_text = handlers, metrics_text
        for one in self._all:
            one.start()

    async def stop(self) -> None:
        """Stop all processes; open streams get the grace time."""
        await asyncio.gather(*(one.stop() for one in self._all))

    def look(self, _: float) -> None:
        """Ping all frontends; to be called every second."""
        for one in self._all:
            one.look()

    def send(self, message: m.Message) -> None:
        """Send to every frontend whose process runs."""
        for one in self._all:
            one.send(message)

    def send_to(self, number: int, message: m.Message) -> None:
        """Send to one frontend, unless its process does not run."""
        self._all[number].send(message)

    def reconfigure(self) -> None:
        """Send the present configuration."""
        self.send(reconfigure(self._settings))

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        """Mount a model's API on every frontend that is up; other frontends mount the API later.

        A frontend that fails where another one succeeded is replaced.

        Raises:
            GpupoolError: the reason why no frontend can mount the API.
        """
        asked = [one for one in self._all if one.is_up]
        calls = (one.serve(model, loaded) for one in asked)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [
            (one, outcome)
            for one, outcome in zip(asked, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]
        if errors and True not in outcomes:
            raise errors[0][1]
        for one, error in errors:
            one.end(f"it could not mount {model.name}, as others could: {error}")

    # What a frontend's supervisor needs of the daemon, see ``frontend.Daemon``.

    def from_frontend(self, frontend: Frontend, message: m.FromFrontend) -> None:
        self._given.on_message(frontend, message)

    async def set_up(self, frontend: Frontend) -> None:
        """Send the rules of access to a frontend and mount every model."""
        await self._given.on_up(frontend)

    def frontend_up(self, frontend: Frontend) -> None:
        """Ensure that some frontend accepts connections.

        A frontend accepts when every model is mounted: before, a request would get 503 where
        another frontend answers. Without another frontend, 503 with ``Retry-After`` is better than
        no answer.
        """
        self._open()

    async def frontend_down(self, frontend: Frontend, death: Death) -> None:
        """Ensure that some frontend accepts connections; those of ``frontend`` are lost."""
        self._open()
        await self._given.on_down(frontend, death)

    async def metrics_text(self) -> bytes:
        """Return the text for ``/metrics``."""
        assert self._metrics_text is not None
        return await self._metrics_text()

    @property
    def _given(self) -> Handlers[Frontend, m.FromFrontend]:
        assert self._handlers is not None
        return self._handlers

    def _open(self) -> None:
        if not any(one.accepts for one in self._all):
            for one in self._all:
                one.accept()
