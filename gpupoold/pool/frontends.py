"""The frontend: one supervised process on the daemon's listening socket."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable

from gpupoold.buckets import WORK_BOUNDS_S, Buckets
from gpupoold.config import ServerSettings, Settings
from gpupoold.errors import Failed, GpupoolError, error_from_code
from gpupoold.pool.blame import Death, death_of
from gpupoold.pool.child import Child
from gpupoold.pool.forks import ForkServer
from gpupoold.pool.reconfigure import reconfigure
from gpupoold.pool.restarts import keep_running
from gpupoold.pool.watchdog import Watch
from gpupoold.process import as_words
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_logger = logging.getLogger(__name__)

_SERVE_TIMEOUT_S = 120.0


class FrontendSupervisor:
    """Starts, watches and restarts the frontend; connections wait in the socket meanwhile.

    ``loop_lag`` is that of its event loop, in seconds. ``metrics`` makes the text for
    ``/metrics`` when it asks for it.
    """

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        on_message: Callable[[m.FromFrontend], None],
        on_up: Callable[[], Awaitable[None]],
        on_down: Callable[[Death], None],
    ) -> None:
        self._settings = settings
        self._forks = forks
        self._listener = listener
        self._on_message = on_message
        self._on_up = on_up
        self._on_down = on_down
        self._child: Child[m.FromFrontend] | None = None
        self._serving: dict[int, asyncio.Future[None]] = {}
        self._next_call = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_ready = False
        self.num_restarts = 0
        self.loop_lag = Buckets(WORK_BOUNDS_S)
        self.metrics: Callable[[], Awaitable[bytes]] | None = None
        self.watch: Watch | None = None
        self._ended_for = ""

    @property
    def is_excused(self) -> bool:
        """Never: see :class:`Watched`."""
        return False

    def look(self, _: float) -> None:
        """Ask it whether it is there; to be called every second."""
        if self.is_ready:
            self.send(m.Ping())

    def end(self, reason: str) -> None:
        """Kill the process that runs; it is replaced."""
        if self._child is not None and not self._ended_for:
            _logger.error("the frontend is killed: %s", reason)
            self._ended_for = reason
            self._child.kill()

    def start(self) -> None:
        """Start the process; ``on_up`` is called whenever one is ready."""
        self._keep(keep_running("the frontend", self._run_once), "frontend")

    async def stop(self) -> None:
        """Stop the process; open streams get the grace time."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._child is not None:
            await self._child.stop(m.Shutdown(), self._settings.limits.stop_grace_s)

    def send(self, message: m.Message) -> None:
        """Send, or do nothing while no frontend runs."""
        if self._child is not None and not self._child.channel.closed:
            self._child.channel.send(message)

    def reconfigure(self) -> None:
        """Tell it what the configuration says now."""
        self.send(reconfigure(self._settings))

    async def serve(self, model: m.ModelToLoad, loaded: m.LoadedModel) -> None:
        """Mount a model's API; a frontend that is not up mounts it when it comes.

        Raises:
            GpupoolError: the frontend's reason.
        """
        if not self.is_ready:
            return
        self._next_call += 1
        call_id = self._next_call
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._serving[call_id] = future
        self.send(m.ServeModel(call_id, model, loaded))
        try:
            await asyncio.wait_for(future, _SERVE_TIMEOUT_S)
        except TimeoutError:
            raise Failed(f"{model.name}: the frontend did not mount its API in time") from None
        finally:
            self._serving.pop(call_id, None)

    async def _run_once(self) -> bool:
        """One life of the process; whether it had come up, and somebody else ended it."""
        settings, known = self._settings, reconfigure(self._settings)
        child: Child[m.FromFrontend] = await Child.start(
            "frontend",
            "gpupoold.frontend",
            as_words(
                {
                    "--log-level": settings.log.level,
                    "--max-body-bytes": settings.server.max_body_bytes,
                    **_tls_options(settings.server),
                }
            ),
            m.FromFrontend,
            settings.paths.log_dir / "frontend.log",
            fd_options={"--listen-fd": self._listener.fileno()},
            starter=self._forks.fork,
        )
        self._child, self.watch = child, Watch(time.monotonic())
        if reconfigure(settings) != known:
            self.reconfigure()  # it has changed meanwhile
        try:
            while True:
                self._note(await child.channel.receive())
        except ChannelClosed:
            pass
        except Exception:
            _logger.exception("a message of the frontend could not be handled")
            self.end("it sent what could not be handled")
        death = death_of(await child.ended(), self._ended_for)
        was_ready, self.is_ready = self.is_ready, False
        self._child, self.watch, self._ended_for = None, None, ""
        self.num_restarts += 1
        for future in self._serving.values():
            if not future.done():
                future.set_result(None)  # the next frontend mounts everything anew
        self._on_down(death)
        return was_ready and not death.is_at_fault

    async def _come_up(self) -> None:
        try:
            await self._on_up()
        except Exception as error:
            _logger.exception("setting the frontend up failed")
            self.end(f"it could not be set up: {error}")

    async def _tell_metrics(self, call_id: int) -> None:
        if self.metrics is None:
            return
        try:
            text = await self.metrics()
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
                self.is_ready = True
                self._keep(self._come_up(), "frontend-up")
            case m.CallResult():
                future = self._serving.get(message.call_id)
                if future is not None and not future.done():
                    _settle(future, message)
            case _:
                self._on_message(message)

    def _keep(self, work: Awaitable[None], name: str) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _tls_options(server: ServerSettings) -> dict[str, object]:
    if server.tls_cert is None:
        return {}
    return {"--tls-cert": server.tls_cert, "--tls-key": server.tls_key}


def _settle(future: asyncio.Future[None], result: m.CallResult) -> None:
    if not result.error_code:
        future.set_result(None)
        return
    error: GpupoolError = error_from_code(
        result.error_code, result.error_message, result.error_hint
    )
    future.set_exception(error)
