"""One frontend: a supervised process on the daemon's listening socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Coroutine
from typing import Any, Protocol

from gpupoold.config.schema import ServerSettings, Settings
from gpupoold.control.processes.backoff import Backoff
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.crash_attribution import Death, death_of
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.reconfigure import reconfigure
from gpupoold.control.processes.restarts import keep_running
from gpupoold.control.processes.watchdog import Watch
from gpupoold.errors import Failed, GpupoolError, error_from_code
from gpupoold.stats.buckets import WORK_BOUNDS_S, Buckets
from gpupoold.system.process import as_words
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_logger = logging.getLogger(__name__)

_SERVE_TIMEOUT_S = 120.0
# Between the starts of a frontend that ends before it is set up. One that was set up is started
# again at once, whatever has ended it: its clients have no use for a penalty.
_MAX_BACKOFF_S = 1.0


class Daemon(Protocol):
    """Callbacks of a frontend's supervisor."""

    def from_frontend(self, frontend: Frontend, message: m.FromFrontend) -> None:
        """Handle a message that does not concern the process itself."""

    async def set_up(self, frontend: Frontend) -> None:
        """Send the rules of access to a new frontend, and mount every model."""

    def frontend_up(self, frontend: Frontend) -> None:
        """Note that a frontend handles messages; ``set_up`` follows."""

    async def frontend_down(self, frontend: Frontend, death: Death) -> None:
        """Note that a frontend and its connections have ended."""

    async def metrics_text(self) -> bytes:
        """Return the text for ``/metrics``."""


class Frontend:
    """Starts, watches and restarts one process; ``name`` is ``frontend-NUMBER``.

    A process is *up* when it handles messages, *accepts* after the order to accept, and is *ready*
    after reporting that it accepts connections. ``loop_lag`` is the lag of the process's event loop
    in seconds.
    """

    def __init__(
        self,
        number: int,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        daemon: Daemon,
    ) -> None:
        self.number = number
        self.name = f"frontend-{number}"
        self._settings = settings
        self._forks = forks
        self._listener = listener
        self._daemon = daemon
        self._child: Child[m.FromFrontend] | None = None
        self._serving: dict[int, asyncio.Future[bool]] = {}
        self._next_call = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_up = False
        self.accepts = False
        self.is_ready = False
        self._setting_up: asyncio.Task[None] | None = None
        self._is_set_up = False
        self.num_restarts = 0
        self.loop_lag = Buckets(WORK_BOUNDS_S)
        self.watch: Watch | None = None
        self._ended_for = ""

    @property
    def is_excused(self) -> bool:
        return False

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self._child is None else self._child.pid

    def look(self) -> None:
        """Ping the process; to be called every second."""
        if self.is_up:
            self.send(m.Ping())

    def end(self, reason: str) -> None:
        """Kill the process, which is then replaced."""
        if self._child is not None and not self._ended_for:
            _logger.error("%s is killed: %s", self.name, reason)
            self._ended_for = reason
            self._child.kill()

    def start(self) -> None:
        """Start the process, and restart the process after each end."""
        self._keep(keep_running(self.name, self._run_once, Backoff(_MAX_BACKOFF_S)), self.name)

    async def stop(self) -> None:
        """Stop the process; open streams get the grace time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(m.Shutdown(), self._settings.limits.stop_grace_s)

    def send(self, message: m.Message) -> None:
        """Send a message, unless no process runs."""
        if self._child is not None and not self._child.channel.closed:
            self._child.channel.send(message)

    def accept(self) -> None:
        """Let the process accept connections, unless it already may."""
        if self.is_up and not self.accepts:
            self.accepts = True
            self.send(m.Accept())

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> bool:
        """Mount a model's API; return False if the process ended before.

        The next process mounts every model.

        Raises:
            GpupoolError: the process's reason, or no answer in time.
        """
        if not self.is_up:
            return False
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._serving[call_id] = future
        self.send(m.ServeModel(call_id, model, loaded))
        try:
            return await asyncio.wait_for(future, _SERVE_TIMEOUT_S)
        except TimeoutError:
            raise Failed(
                f"{model.name}: {self.name} did not mount its API within {_SERVE_TIMEOUT_S:g} s"
            ) from None
        finally:
            self._serving.pop(call_id, None)

    async def _run_once(self) -> bool:
        """Run one process to its end; return whether the process had been set up."""
        settings, known = self._settings, reconfigure(self._settings)
        child: Child[m.FromFrontend] = await Child.start(
            self.name,
            "gpupoold.frontend",
            as_words(
                {
                    "--number": self.number,
                    "--log-level": settings.log.level,
                    "--max-body-bytes": known.max_body_bytes,
                    "--max-live-requests": known.max_live_requests,
                    "--max-bytes-in-flight": known.max_bytes_in_flight,
                    **_tls_options(settings.server),
                }
            ),
            m.FromFrontend,
            settings.paths.log_dir / f"{self.name}.log",
            fd_options={"--listen-fd": self._listener.fileno()},
            starter=self._forks.fork,
        )
        self._child, self.watch = child, Watch(time.monotonic())
        if reconfigure(settings) != known:
            self.send(reconfigure(settings))  # the configuration has changed meanwhile
        try:
            while True:
                self._note(await child.channel.receive())
        except ChannelClosed:
            pass
        except Exception:
            _logger.exception("a message of %s could not be handled", self.name)
            self.end("it sent what could not be handled")
        # Its connections are gone already: nobody waits for the rest of its end.
        self.is_up = self.accepts = self.is_ready = False
        return await self._note_end(death_of(await child.ended(), self._ended_for))

    async def _note_end(self, death: Death) -> bool:
        if self._setting_up is not None:
            self._setting_up.cancel()
        was_set_up, self._is_set_up = self._is_set_up, False
        self._child, self.watch, self._ended_for = None, None, ""
        self.num_restarts += 1
        for future in self._serving.values():
            if not future.done():
                future.set_result(False)
        await self._daemon.frontend_down(self, death)
        return was_set_up

    async def _set_up(self) -> None:
        try:
            await self._daemon.set_up(self)
        except Exception as error:
            _logger.exception("setting %s up failed", self.name)
            self.end(f"it could not be set up: {error}")
        else:
            self._is_set_up = True
            self.accept()

    async def _tell_metrics(self, call_id: int) -> None:
        try:
            text = await self._daemon.metrics_text()
        except Exception:  # the frontend says that there is no answer
            _logger.exception("making the metrics failed")
        else:
            self.send(m.MetricsText(call_id, text))

    def _note(self, message: m.FromFrontend) -> None:
        now_s = time.monotonic()
        assert self.watch is not None
        self.watch.stepped(now_s, 0, has_work=False)
        match message:
            case m.Pong():
                for lag_s in message.lags_s:
                    self.loop_lag.add(lag_s)
            case m.AskMetrics():
                self._keep(self._tell_metrics(message.call_id), "metrics")
            case m.FrontendReady():
                self.watch.came_up(now_s)
                self.is_up = True
                self._daemon.frontend_up(self)
                self._setting_up = self._keep(self._set_up(), f"{self.name}-up")
            case m.Accepting():
                self.is_ready = True
            case m.CallResult():
                future = self._serving.get(message.call_id)
                if future is not None and not future.done():
                    _settle(future, message)
            case _:
                if isinstance(message, m.AddRequest):
                    message.frontend = self.number
                self._daemon.from_frontend(self, message)

    def _keep(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _tls_options(server: ServerSettings) -> dict[str, object]:
    if server.tls_cert is None:
        return {}
    return {"--tls-cert": server.tls_cert, "--tls-key": server.tls_key}


def _settle(future: asyncio.Future[bool], result: m.CallResult) -> None:
    if not result.error_code:
        future.set_result(True)
        return
    error: GpupoolError = error_from_code(
        result.error_code, result.error_message, result.error_hint
    )
    future.set_exception(error)
