"""One frontend: a supervised process on the daemon's listening socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from gpupoold.config.schema import Settings
from gpupoold.config.sections import ServerSettings
from gpupoold.control.processes.child import Child
from gpupoold.control.processes.crash_attribution import Death
from gpupoold.control.processes.forks import ForkServer
from gpupoold.control.processes.handlers import ProcessHandlers
from gpupoold.control.processes.pending import Calls
from gpupoold.control.processes.restarts import Timing
from gpupoold.control.processes.supervised import Supervised, reconfigure
from gpupoold.control.processes.watchdog import Watch
from gpupoold.errors import Failed
from gpupoold.stats.histogram import WORK_BOUNDS_S, Histogram
from gpupoold.system.process import as_words
from gpupoold.system.systemd import KeptSocket
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

_SERVE_TIMEOUT_S = 120.0
# Longest wait before a restart if the set-up did not succeed. After a successful set-up, a frontend
# is restarted at once: a wait would only delay the clients.
_MAX_BACKOFF_S = 1.0


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
        settings, known = self._settings, reconfigure(self._settings)
        return await Child.start(
            self.name,
            "gpupoold.frontend",
            as_words(
                {
                    "--number": self.number,
                    "--log-level": settings.log.level,
                    "--max-body-bytes": known.max_body_bytes,
                    "--max-live-requests": known.max_live_requests,
                    "--max-bytes-in-flight": known.max_bytes_in_flight,
                    "--wait-comments-s": known.wait_comments_s,
                    "--traces-endpoint": settings.traces.endpoint,
                    "--traces-share": settings.traces.share,
                    "--refuses-at-end": int(not isinstance(self._listener, KeptSocket)),
                    **_tls_options(settings.server),
                    **_batch_options(settings),
                }
            ),
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


def _batch_options(settings: Settings) -> dict[str, object]:
    bounds = settings.batches
    return {
        "--batches-folder": settings.paths.state_dir / "batches",
        "--batches-max-bytes": bounds.max_bytes,
        "--batches-max-key-bytes": bounds.max_key_bytes,
        "--batches-max-file-bytes": bounds.max_file_bytes,
        "--batches-max-requests": bounds.max_requests,
        "--batches-max-live": bounds.max_live,
        "--batches-keep-s": bounds.keep_s,
        "--batches-max-key-files": bounds.max_key_files,
        "--batches-max-key-batches": bounds.max_key_batches,
    }


def _tls_options(server: ServerSettings) -> dict[str, object]:
    if server.tls_cert is None:
        return {}
    return {"--tls-cert": server.tls_cert, "--tls-key": server.tls_key}
