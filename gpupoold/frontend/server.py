"""A frontend's life: serve HTTP on the daemon's socket, follow the daemon's messages."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import logging
import os
import socket
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn import Config
from uvicorn.server import ServerState

from gpupool_state.batches import BatchRow
from gpupoold.access.tls import Tls
from gpupoold.config.sections import FrontendSettings, ServerSettings
from gpupoold.errors import Failed, GpupoolError
from gpupoold.frontend.answer_fields import with_errors_of
from gpupoold.frontend.batches.service import BatchService
from gpupoold.frontend.callers import Callers, Cors, FleetCalls
from gpupoold.frontend.client_answer import Traces
from gpupoold.frontend.daemon_calls import MetricsCalls, RateCalls
from gpupoold.frontend.errors import STOPPING, ApiError, fit_for_clients, send_error
from gpupoold.frontend.gates import Gates, WaitComments
from gpupoold.frontend.grammars import GrammarVetting, RunningChecker
from gpupoold.frontend.mounts import Catalog, Mounts
from gpupoold.frontend.preload import preload
from gpupoold.frontend.request_context import BytesInFlight
from gpupoold.frontend.router import Bounds, Router, Services
from gpupoold.system.http_protocol import BoundedHttp, Server, server_config
from gpupoold.system.process import importing, measure_lag, set_log_level, trim_heap
from gpupoold.wire import messages
from gpupoold.wire.channel import AsyncChannel, ChannelClosed

logger = logging.getLogger(__name__)

# The end of the time for stopping: open streams end with an error, then connections are closed.
_ENDING_S = 2.0
_CLOSING_S = 1.0
# Time after the start in which requests wait for models that are loaded for the first time.
_HOLD_S = 45.0

_NEVER = 1_000_000_000
_THRESHOLDS = (2_000, 10, _NEVER)
"""The collector's own collections walk up to 20,000 objects, 10 to 20 ms."""
_INTERVAL_S = 1.0
_FEW_BYTES = 4 << 20
_WITH_FEW_AFTER_S = 60.0
_ALWAYS_AFTER_S = 600.0

_BODY_TIMEOUT_S = 5.0
_RETRY_STOPPING_S = 10.0


class FrontendServer:
    """Connects the catalogue, the mounts and the HTTP server; one per process."""

    def __init__(
        self, settings: FrontendSettings, wire_fd: int, listen_fd: int, checker: RunningChecker
    ) -> None:
        """The frontend owns the descriptors; all frontends share the listening socket."""
        self._settings = settings
        self._listen_fd = listen_fd
        self._tls = tls_of(settings.server)
        self._vetting = GrammarVetting(settings.log_level, checker)
        wire = socket.socket(fileno=wire_fd)
        self._channel: AsyncChannel[messages.ToFrontend] = AsyncChannel(wire, messages.ToFrontend)
        self._catalog = Catalog()
        self._waits = WaitComments(self._channel.send, 0.0)
        self._gates = Gates(self._waits)
        self._metrics = MetricsCalls(self._channel.send)
        self._rates = RateCalls(self._channel.send)
        self._callers = Callers(self._rates)
        self._bounds = Bounds()
        self._collector = Collector(self._bounds.in_flight)
        self._mounts = Mounts(self._collector.note_garbage)
        self._fleet_calls = FleetCalls()
        self._traces = Traces(settings.traces.endpoint, settings.traces.share)
        self._batches = BatchService(
            settings.batches_folder,
            settings.batches,
            self._bounds.in_flight,
            self._callers,
            runs_batches=settings.number == 0,
        )
        services = Services(self._metrics, self._batches, self._traces, self._fleet_calls)
        self._router = Router(
            self._catalog, self._mounts, self._gates, self._callers, self._bounds, services
        )
        self._may_accept = asyncio.Event()
        self._lags_s: list[float] = []
        # Mounting is slow: messages about mounts wait in order, and outputs overtake.
        self._to_mount: asyncio.Queue[messages.ServeModel | messages.StopServing] = asyncio.Queue()

    async def run(self) -> None:
        """Serve until the daemon sends ``Shutdown`` or is gone.

        Raises OSError: the descriptors are invalid.
        """
        # uvicorn warns of every request that is not HTTP, which would fill the log.
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        server = self._http_server()
        serving = asyncio.create_task(self._serve_when_told(server))
        mounting = asyncio.create_task(self._mount_in_order())
        measuring = asyncio.create_task(measure_lag(self._lags_s.append))
        collecting = asyncio.create_task(self._collector.run())
        leaving = asyncio.create_task(self._follow_daemon())
        batches = asyncio.create_task(self._batches.run(self._router.ask, self._tell_wait))
        self._channel.send(messages.FrontendReady(pid=os.getpid()))
        await asyncio.wait({serving, leaving}, return_when=asyncio.FIRST_COMPLETED)
        mounting.cancel()
        measuring.cancel()
        collecting.cancel()
        if not leaving.done():
            leaving.cancel()
            await serving
            raise OSError(f"cannot serve on descriptor {self._listen_fd}")
        batches.cancel()
        await asyncio.wait({batches}, timeout=_CLOSING_S)
        grace_s = leaving.result()
        if not self._may_accept.is_set():
            serving.cancel()
            return
        server.should_exit = True
        self._gates.stop()
        self._bounds.hold_until_s = 0.0
        if grace_s is None:  # without the daemon no stream can go on
            server.force_exit = True
            await serving
            return
        following = asyncio.create_task(self._follow_daemon())
        await self._end_streams(server, serving, grace_s)
        following.cancel()

    async def _end_streams(
        self, server: HttpServer, serving: asyncio.Task[None], grace_s: float
    ) -> None:
        ending_s, closing_s = min(_ENDING_S, grace_s / 2), min(_CLOSING_S, grace_s / 4)
        await asyncio.wait({serving}, timeout=grace_s - ending_s)
        self._mounts.unmount_all(STOPPING)
        await asyncio.wait({serving}, timeout=ending_s - closing_s)
        server.force_exit = True
        await serving

    async def _serve_when_told(self, server: HttpServer) -> None:
        """Accept connections on the daemon's order, until the server exits."""
        listener = socket.socket(fileno=self._listen_fd)
        await self._may_accept.wait()
        await server.serve(sockets=[listener])

    def _http_server(self) -> HttpServer:
        tls = self._tls
        refusing = None
        if self._settings.refuses_at_end:
            refusing = http_config(Cors(refuse_stopping, self._callers), tls)
        return HttpServer(
            http_config(self._router, tls),
            lambda: self._try_to_send(messages.Accepting()),
            refusing,
        )

    async def _follow_daemon(self) -> float | None:
        """Handle messages until the end; return the seconds for it, None if the daemon is gone."""
        while True:
            try:
                message = await self._channel.receive()
            except ChannelClosed:
                logger.error("the daemon closed its end of the channel")
                return None
            if isinstance(message, messages.Shutdown):
                return message.grace_s
            try:
                self._handle(fit_for_clients(message))
            except Exception:
                # An error of one model must not end other models' streams.
                logger.exception("handling %s", type(message).__name__)

    def _handle(self, message: messages.ToFrontend) -> None:
        match message:
            case messages.StepOutputs():
                self._waits.progressed(message.progress)
                self._gates.progressed(message.progress)
                self._mounts.deliver(message)
            case messages.FirstTokens():
                self._gates.first_tokens(message)
            case messages.Waits():
                self._waits.told(message)
            case messages.AdmissionAnswer():
                self._note_admission(message)
            case messages.ServeModel() | messages.StopServing():
                self._to_mount.put_nowait(message)
            case messages.ModelList():
                self._catalog.replace(message.models, message.ready)
            case messages.RequestsFailed():
                self._mounts.fail(message)
            case messages.GrammarRefused():
                self._vetting.convict(
                    message.model, message.key_id, message.grammar, message.reason
                )
            case messages.AccessRules():
                self._callers.replace(message)
            case messages.FleetSecret():
                self._fleet_calls.secret = message.secret
                self._fleet_calls.downloads = message.downloads
            case messages.RateAnswer():
                self._rates.answered(message)
            case messages.Accept():
                self._bounds.hold_until_s = time.monotonic() + _HOLD_S
                self._may_accept.set()
            case messages.Reconfigure():
                set_log_level(message.log_level)
                self._waits.interval_s = message.wait_comments_s
                self._bounds.max_body_bytes = message.max_body_bytes
                self._bounds.max_live_requests = message.max_live_requests
                self._bounds.in_flight.max_bytes = message.max_bytes_in_flight
            case messages.Ping():
                self._answer_ping()
            case messages.MetricsText():
                self._metrics.answered(message)
            case _:
                logger.warning("unexpected message %s", type(message).__name__)

    def _answer_ping(self) -> None:
        self._channel.send(messages.Pong(self._lags_s.copy(), self._mounts.take_paced_gaps()))
        self._lags_s.clear()
        if self._tls is not None:
            self._tls.renew()
        report = self._callers.report()
        if report is not None:
            self._channel.send(report)

    def _note_admission(self, message: messages.AdmissionAnswer) -> None:
        """After a refusal of one engine request, end all requests of its HTTP request."""
        doomed = self._gates.answered(message)
        if doomed:
            model = message.model
            self._mounts.fail(messages.RequestsFailed(model, doomed, message.message))
            self._channel.send(messages.AbortRequests(model, doomed))

    def _send(self, message: msgspec.Struct) -> None:
        if isinstance(message, messages.AddRequest):
            self._gates.asked(message.request_id)
            self._callers.asked(message)
        self._channel.send(message)

    def _tell_wait(self, batch: BatchRow, reason: str) -> None:
        self._try_to_send(messages.BatchWaits(batch.id, batch.owner, reason))

    def _try_to_send(self, message: msgspec.Struct) -> None:
        with contextlib.suppress(ChannelClosed):  # the reading task handles the daemon's end
            self._channel.send(message)

    async def _mount_in_order(self) -> None:
        adapter = await self._load_adapter()
        while True:
            message = await self._to_mount.get()
            if isinstance(message, messages.ServeModel):
                self._channel.send(await self._mount(adapter, message))
            else:
                name = message.name
                try:
                    self._mounts.unmount(name, f"the model {name} is no longer served")
                except Exception:
                    logger.exception("unmounting %s", name)

    async def _load_adapter(self) -> Any:
        """Return the adapter module, or the error for every ``ServeModel``."""
        try:
            return await asyncio.to_thread(_import_adapter, self._settings.log_level)
        except GpupoolError as error:
            logger.error("%s", error)
            return error
        except Exception as error:
            logger.exception("importing vLLM")
            return Failed(f"vLLM could not be imported: {error!r}")

    async def _mount(self, adapter: Any, message: messages.ServeModel) -> messages.CallResult:
        try:
            if isinstance(adapter, GpupoolError):
                raise adapter
            api = await asyncio.to_thread(
                adapter.VllmModelApi,
                message.model,
                message.loaded,
                self._send,
                self._vetting,
                self._gates.prefilled,
            )
        except Exception as error:
            return _failure(message, error)
        self._mounts.mount(message.model.name, api)
        logger.info("serving %s", message.model.name)
        return messages.CallResult(call_id=message.call_id)


def _import_adapter(log_level: str) -> Any:
    with importing():
        preload(log_level)
        return importlib.import_module("gpupoold.frontend.adapter")


def _failure(message: messages.ServeModel, error: Exception) -> messages.CallResult:
    name = message.model.name
    if isinstance(error, GpupoolError):
        text, hint = error.message, error.hint
    else:
        logger.error("building the API of %s", name, exc_info=error)
        text, hint = str(error) or repr(error), ""
    return messages.CallResult(
        call_id=message.call_id,
        error_code=Failed.code,
        error_message=f"the API of {name} could not be built: {text}",
        error_hint=hint,
    )


class Collector:
    """Collects garbage soon after the last request, or beside small ones from time to time.

    ``in_flight`` tells how much memory the present requests may have. ``clock`` returns seconds.

    A collection walks all objects and stops the event loop: 0.4 s while the answers with 100,000
    log-probabilities are made. Such objects form no cycles, and go when the answer has been sent.
    """

    def __init__(
        self, in_flight: BytesInFlight, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight = in_flight
        self._clock = clock
        self._last_s = clock()
        self._has_garbage = False

    def note_garbage(self) -> None:
        """Record that large cycles of objects are unused: a model's API, which has some MB."""
        self._has_garbage = True

    async def run(self) -> None:
        """Collect for ever, in place of full collections by the interpreter."""
        gc.set_threshold(*_THRESHOLDS)
        while True:
            await asyncio.sleep(_INTERVAL_S)
            if self.is_due():
                gc.collect()
                await asyncio.to_thread(trim_heap)

    def is_due(self) -> bool:
        """Return whether to collect now; to be called regularly."""
        now_s, num_bytes = self._clock(), self._in_flight.num_bytes
        past_s = now_s - self._last_s
        if num_bytes:
            self._has_garbage = True
            after_s = _WITH_FEW_AFTER_S if num_bytes <= _FEW_BYTES else _ALWAYS_AFTER_S
            is_due = past_s >= after_s
        else:
            is_due, self._has_garbage = self._has_garbage, False
        if is_due:
            self._last_s = now_s
        return is_due


def tls_of(server: ServerSettings) -> Tls | None:
    if server.tls_cert is None or server.tls_key is None:
        return None
    return Tls(server.tls_cert, server.tls_key)


def http_config(app: ASGIApp, tls: Tls | None) -> uvicorn.Config:
    # The same context each time: renewed certificates are loaded into the context.
    contexts = None if tls is None else lambda *_: tls.context()
    return server_config(app, PublicHttp, server_header=False, ssl_context_factory=contexts)


class HttpServer(Server):
    """A server that calls ``on_accepting`` once.

    With ``refusing``, the server's end refuses new connections, and those without a request so far,
    while answers in progress are completed: ``refusing`` configures a server for these connections.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        on_accepting: Callable[[], None],
        refusing: uvicorn.Config | None = None,
    ) -> None:
        super().__init__(config)
        self._on_accepting = on_accepting
        self._refusing = refusing

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_accepting()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        async with contextlib.AsyncExitStack() as stack:
            if self._refusing is not None:
                self._refusing.load()
                state = ServerState()
                for sock in sockets or ():
                    stack.callback((await self._refuse(sock.dup(), self._refusing, state)).close)
                for connection in tuple(self.server_state.connections):
                    if isinstance(connection, PublicHttp):
                        connection.move(self._refusing, state)
            await super().shutdown(sockets)

    async def _refuse(
        self, listener: socket.socket, config: uvicorn.Config, state: ServerState
    ) -> asyncio.Server:
        """Serve with connections of its own, which the end of the server does not wait for."""
        return await asyncio.get_running_loop().create_server(
            lambda: PublicHttp(config, state, {}), sock=listener, ssl=config.ssl
        )


async def refuse_stopping(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer every request with 503: the ASGI application of a server that stops."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            # A connection closed before the body was read would be reset, without the answer.
            while (await receive()).get("more_body"):
                pass
    close = [(b"connection", b"close")]
    error = ApiError(503, STOPPING, retry_after_s=_RETRY_STOPPING_S, more_headers=close)
    await send_error(with_errors_of(scope["path"], send), error)


class PublicHttp(BoundedHttp):
    """A connection of the public API."""

    def refusal(self, status: HTTPStatus, message: str) -> dict[str, object]:
        return ApiError(status.value, message).body()

    def move(self, config: Config, state: ServerState) -> None:
        """Let the server of ``config`` and ``state`` have the connection, if it has no request."""
        if self.cycle is None:
            self.connections.discard(self)
            self.config, self.app = config, config.loaded_app
            self.server_state, self.tasks = state, state.tasks
            self.connections = state.connections
            self.connections.add(self)
