"""The frontends: several processes that accept on the daemon's one listening socket.

They share the socket's queue of connections: what one of them does not accept, because it has
died or hangs, another does. (With a socket of its own for each, ``SO_REUSEPORT``, connections
in the queue of a process that dies would be lost.)
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
from gpupoold.control.processes.reconfigure import reconfigure
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class Frontends:
    """All frontends by number; one object per daemon.

    ``metrics`` makes the text for ``/metrics`` when a frontend asks for it.
    """

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        on_message: Callable[[Frontend, m.FromFrontend], None],
        on_up: Callable[[Frontend], Awaitable[None]],
        on_down: Callable[[Frontend, Death], None],
    ) -> None:
        """``on_up`` says who may ask for what, and mounts every model."""
        self._settings = settings
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self.metrics: Callable[[], Awaitable[bytes]] | None = None
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

    def start(self) -> None:
        for one in self._all:
            one.start()

    async def stop(self) -> None:
        """Stop all processes; open streams get the grace time."""
        await asyncio.gather(*(one.stop() for one in self._all))

    def look(self, _: float) -> None:
        """Ask all whether they are there; to be called every second."""
        for one in self._all:
            one.look()

    def send(self, message: m.Message) -> None:
        """Send to every frontend whose process runs."""
        for one in self._all:
            one.send(message)

    def send_to(self, number: int, message: m.Message) -> None:
        """Send to one frontend, or do nothing while its process does not run."""
        self._all[number].send(message)

    def reconfigure(self) -> None:
        """Send what the configuration says now."""
        self.send(reconfigure(self._settings))

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        """Mount a model's API on every frontend that is up; the others mount it when they come.

        A frontend that cannot mount what another one has mounted is replaced.

        Raises:
            GpupoolError: why no frontend that is up can mount the API.
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
        self._on_message(frontend, message)

    async def set_up(self, frontend: Frontend) -> None:
        """Tell a frontend who may ask for what; mount every model on it."""
        await self._on_up(frontend)

    def frontend_up(self, frontend: Frontend) -> None:
        """See that somebody accepts connections.

        A frontend accepts when every model is mounted on it: until then it would answer 503
        where another does not. Where there is no other, 503 and ``Retry-After`` are better
        than no answer.
        """
        self._open()

    def frontend_down(self, frontend: Frontend, death: Death) -> None:
        """See that somebody accepts connections; those of ``frontend`` are gone."""
        self._open()
        self._on_down(frontend, death)

    async def metrics_text(self) -> bytes:
        """Return the text for ``/metrics``."""
        if self.metrics is None:
            raise RuntimeError("nobody makes the metrics")
        return await self.metrics()

    def _open(self) -> None:
        if not any(one.accepts for one in self._all):
            for one in self._all:
                one.accept()
