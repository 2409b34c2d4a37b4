"""The frontends: processes that accept on the daemon's one listening socket.

The frontends share the socket's queue: if a frontend hangs or has died, another frontend accepts
the connections. (With one socket per frontend, ``SO_REUSEPORT``, connections in the queue of a dead
process would be lost.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from gpupoold.config.schema import Settings
from gpupoold.config.sections import FrontendSettings
from gpupoold.control.processes.child import Calls, Child, ForkServer
from gpupoold.control.processes.supervised import (
    REAL_TIME,
    Death,
    ProcessHandlers,
    Supervised,
    Timing,
    Watch,
)
from gpupoold.errors import Failed
from gpupoold.stats.histogram import WORK_BOUNDS_S, Histogram
from gpupoold.system.systemd import KeptSocket
from gpupoold.wire import messages as m

_REPLACING_S = 60.0
_LOOK_S = 0.1

_logger = logging.getLogger(__name__)

_SERVE_TIMEOUT_S = 120.0
# Longest wait before a restart if the set-up did not succeed. After a successful set-up, a frontend
# is restarted at once: a wait would only delay the clients.
_MAX_BACKOFF_S = 1.0


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
        return any(frontend.is_ready for frontend in self._all)

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
        await asyncio.gather(*(frontend.stop() for frontend in self._all))
        self._listener.close()

    def check(self, _: float) -> None:
        """Ping the running frontends; to be called every second."""
        for frontend in self._all:
            if frontend.is_up:
                frontend.send(m.Ping())

    def send(self, message: m.Message) -> None:
        """Send to every frontend with a running process."""
        for frontend in self._all:
            frontend.send(message)

    def send_to(self, number: int, message: m.Message) -> None:
        """Send to one frontend, unless its process does not run."""
        self._all[number].send(message)

    def reconfigure(self) -> None:
        for frontend in self._all:
            frontend.reconfigure()

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        """Mount a model's API on every running frontend; other frontends mount the API later.

        A frontend that fails where another frontend succeeds is replaced, and so is every frontend
        that does not answer in time. Raises GpupoolError: the reason why no frontend can mount the
        API.
        """
        asked = [frontend for frontend in self._all if frontend.is_up]
        calls = (frontend.serve(model, loaded) for frontend in asked)
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        errors = [
            (frontend, outcome)
            for frontend, outcome in zip(asked, outcomes, strict=True)
            if isinstance(outcome, BaseException)
        ]
        if errors and True not in outcomes:
            raise errors[0][1]
        for frontend, error in errors:
            # A frontend that did not answer in time is replaced already.
            if not isinstance(error, NotMounted):
                frontend.end(
                    f"mounting {model.name} failed, but succeeded in another frontend: {error}"
                )

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
        if not any(frontend.accepts for frontend in self._all):
            for frontend in self._all:
                frontend.accept()


class NotMounted(Failed):
    """A frontend did not mount an API in time."""


@dataclass(frozen=True, slots=True)
class FrontendHandlers(ProcessHandlers["Frontend", m.FromFrontend]):
    """Handlers of one frontend's events and questions.

    ``metrics_text`` returns the text for ``/metrics``. ``ensure_open``, called when a frontend
    comes up or ends, lets some frontend accept connections. ``on_stuck`` replaces a frontend that
    does not mount an API in time, and can mount no other.
    """

    metrics_text: Callable[[], Awaitable[bytes]]
    ensure_open: Callable[[], None]
    on_stuck: Callable[[Frontend, NotMounted], None]


class Frontend(Supervised[m.FromFrontend]):
    """A process that serves clients; ``name`` is ``frontend-NUMBER``.

    A process is *up* when it handles messages, *accepts* after the order to accept, and is *ready*
    after reporting that it accepts connections. ``loop_lag`` is the lag of the process's event loop
    in seconds.
    """

    # A request that was accepted just before the stop is scheduled or refused.
    handles_last_messages = True

    def __init__(
        self,
        number: int,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        handlers: FrontendHandlers,
        timing: Timing,
    ) -> None:
        super().__init__(f"frontend-{number}", settings, timing, _MAX_BACKOFF_S)
        self.number = number
        self._forks = forks
        self._listener = listener
        self._handlers = handlers
        self._serving: Calls[bool] = Calls()
        self.is_up = False
        self.accepts = False
        self.is_ready = False
        self._is_set_up = False
        self.loop_lag = Histogram(WORK_BOUNDS_S)

    def accept(self) -> None:
        """Order the process to accept connections, unless ordered before."""
        if self.is_up and not self.accepts:
            self.accepts = True
            self.send(m.Accept())

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> bool:
        """Mount a model's API; return False if the process ended before.

        The next process mounts every model.

        Raises:
            NotMounted: no answer came in time; the process is replaced.
            GpupoolError: the process's reason.
        """
        if not self.is_up:
            return False
        call_id = self._serving.next_id()
        self.send(m.ServeModel(call_id, model, loaded))
        # The limit holds after the end of the caller too: the process mounts in order.
        waiting = asyncio.create_task(self._mounted(call_id, model.name))
        self._tasks.add(waiting)
        waiting.add_done_callback(self._tasks.discard)
        waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(waiting)

    async def _mounted(self, call_id: int, model: str) -> bool:
        try:
            return await self._serving.answer(call_id, _SERVE_TIMEOUT_S)
        except TimeoutError:
            error = NotMounted(
                f"{model}: {self.name} did not mount the API within {_SERVE_TIMEOUT_S:g} s",
                "see `gpupool logs`; reading or rendering the checkpoint's files may not end",
            )
            self._handlers.on_stuck(self, error)
            raise error from None

    async def _launch(self) -> Child[m.FromFrontend]:
        settings = self._settings
        own = FrontendSettings(
            number=self.number,
            log_level=settings.log.level,
            refuses_at_end=not isinstance(self._listener, KeptSocket),
            server=settings.server,
            traces=settings.traces,
            batches=settings.batches,
            batches_folder=settings.paths.state_dir / "batches",
        )
        return await Child.start(
            self.name,
            "gpupoold.frontend",
            ["--settings", own.model_dump_json(by_alias=True)],
            m.FromFrontend,
            self.log_path,
            fd_options={"--listen-fd": self._listener.fileno()},
            starter=self._forks.fork,
        )

    async def _receive(self, child: Child[m.FromFrontend], watch: Watch) -> None:
        await super()._receive(child, watch)
        # The connections are closed: no client waits for the end of the process.
        self.is_up = self.accepts = self.is_ready = False

    async def _set_up(self) -> None:
        await self._handlers.on_up(self)
        self._is_set_up = True
        self.accept()

    async def _note_end(self, death: Death) -> bool:
        """Report the end, which is excused if the set-up had succeeded."""
        was_set_up, self._is_set_up = self._is_set_up, False
        self._handlers.ensure_open()
        await self._handlers.on_down(self, death)
        return was_set_up

    def _forget(self, reason: str) -> None:
        super()._forget(reason)
        self._serving.resolve_all(False)

    def _note(self, message: m.FromFrontend, watch: Watch, now_s: float) -> None:
        watch.stepped(now_s, 0, has_work=False)
        match message:
            case m.Pong():
                for lag_s in message.lags_s:
                    self.loop_lag.add(lag_s)
                if message.paced_gaps:
                    self._handlers.on_message(self, message)
            case m.AskMetrics():
                self._keep(self._send_metrics(message.call_id), "metrics")
            case m.FrontendReady():
                watch.came_up(now_s)
                self.is_up = True
                self._handlers.ensure_open()
                self._begin_set_up()
            case m.Accepting():
                self.is_ready = True
            case m.CallResult():
                self._serving.answered(message, True)
            case _:
                if isinstance(message, m.AddRequest):
                    message.frontend = self.number
                self._handlers.on_message(self, message)

    async def _send_metrics(self, call_id: int) -> None:
        try:
            text = await self._handlers.metrics_text()
        except Exception:  # the frontend answers the client after a time limit
            _logger.exception("building the metrics failed")
        else:
            self.send(m.MetricsText(call_id, text))
