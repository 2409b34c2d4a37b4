"""The frontends: processes that accept on the daemon's one listening socket.

The frontends share the socket's queue: if a frontend hangs or has died, another frontend accepts
the connections. (With one socket per frontend, ``SO_REUSEPORT``, connections in the queue of a dead
process would be lost.)
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

from gpupoold.config.schema import Settings
from gpupoold.control.frontends.frontend import Frontend, FrontendHandlers, NotMounted
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.handlers import ProcessHandlers
from gpupoold.control.processes.restarts import REAL_TIME, Timing
from gpupoold.wire import messages as m

_REPLACING_S = 60.0
_LOOK_S = 0.1


class Frontends:
    """All frontends by number, none before the start; one object per daemon."""

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        timing: Timing = REAL_TIME,
    ) -> None:
        self._settings = settings
        self._forks = forks
        self._listener = listener
        self._timing = timing
        self._all: list[Frontend] = []
        self._replacing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[Frontend]:
        return iter(self._all)

    @property
    def any_ready(self) -> bool:
        """True if any frontend accepts connections."""
        return any(one.is_ready for one in self._all)

    def start(
        self,
        handlers: ProcessHandlers[Frontend, m.FromFrontend],
        metrics_text: Callable[[], Awaitable[bytes]],
    ) -> None:
        """Start all processes.

        ``handlers.on_up`` sends the rules of access and mounts every model; ``metrics_text``
        returns the text for ``/metrics``.
        """
        of_each = FrontendHandlers(
            handlers.on_message,
            handlers.on_up,
            handlers.on_down,
            metrics_text,
            self._ensure_open,
            self._replace_later,
        )
        for number in range(self._settings.server.frontends):
            frontend = Frontend(
                number, self._settings, self._forks, self._listener, of_each, self._timing
            )
            self._all.append(frontend)
            frontend.start()

    async def stop(self) -> None:
        """Stop all processes; open streams get the grace time.

        Connections are refused afterwards, unless systemd keeps the socket for the next daemon.
        """
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(one.stop() for one in self._all))
        self._listener.close()

    def check(self, _: float) -> None:
        """Ping the running frontends; to be called every second."""
        for one in self._all:
            if one.is_up:
                one.send(m.Ping())

    def send(self, message: m.Message) -> None:
        """Send to every frontend with a running process."""
        for one in self._all:
            one.send(message)

    def send_to(self, number: int, message: m.Message) -> None:
        """Send to one frontend, unless its process does not run."""
        self._all[number].send(message)

    def reconfigure(self) -> None:
        """Send the present configuration."""
        for one in self._all:
            one.reconfigure()

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        """Mount a model's API on every running frontend; other frontends mount the API later.

        A frontend that fails where another frontend succeeds is replaced, and so is every frontend
        that does not answer in time.

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
            if isinstance(error, NotMounted):
                continue  # is replaced already
            one.end(f"mounting {model.name} failed, but succeeded in another frontend: {error}")

    def _replace_later(self, frontend: Frontend, error: NotMounted) -> None:
        work = self._replace(frontend, frontend.pid, error)
        task = asyncio.create_task(work, name="replace-frontend")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _replace(self, frontend: Frontend, pid: int | None, error: NotMounted) -> None:
        """Replace a process; of several one after another, so that some serve meanwhile."""
        async with self._replacing:
            if frontend.pid != pid:
                return  # has ended by itself
            frontend.end(error.message)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REPLACING_S):
                    while frontend.pid in (pid, None) or not frontend.is_ready:
                        await self._timing.sleep(_LOOK_S)

    def _ensure_open(self) -> None:
        """Ensure that some frontend accepts connections.

        A frontend accepts when every model is mounted: before, a request would get 503 where
        another frontend answers. Without another frontend, 503 with ``Retry-After`` is better than
        no answer.
        """
        if not any(one.accepts for one in self._all):
            for one in self._all:
                one.accept()
