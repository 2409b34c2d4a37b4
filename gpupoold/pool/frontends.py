"""The frontend: one supervised process on the daemon's listening socket."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable

from gpupoold.config import Settings
from gpupoold.errors import Failed, GpupoolError, error_from_code
from gpupoold.pool.child import Child
from gpupoold.pool.forks import ForkServer
from gpupoold.wire import messages as m
from gpupoold.wire.channel import ChannelClosed

_logger = logging.getLogger(__name__)

_BACKOFF_S = 1.0
_SERVE_TIMEOUT_S = 120.0


class FrontendSupervisor:
    """Starts, watches and restarts the frontend; connections wait in the socket meanwhile."""

    def __init__(
        self,
        settings: Settings,
        forks: ForkServer,
        listener: socket.socket,
        on_message: Callable[[m.FromFrontend], None],
        on_up: Callable[[], Awaitable[None]],
        on_down: Callable[[], None],
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

    def start(self) -> None:
        """Start the process; ``on_up`` is called whenever one is ready."""
        self._keep(self._keep_running(), "frontend")

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

    async def _keep_running(self) -> None:
        while True:
            try:
                await self._run_once()
            except OSError as error:
                _logger.error("the frontend could not be started: %s", error)
            except Exception:
                _logger.exception("following the frontend failed")
            await asyncio.sleep(_BACKOFF_S)

    async def _run_once(self) -> None:
        settings = self._settings
        child: Child[m.FromFrontend] = await Child.start(
            "frontend",
            "gpupoold.frontend",
            [
                "--log-level",
                settings.log.level,
                "--max-body-bytes",
                str(settings.server.max_body_bytes),
            ],
            m.FromFrontend,
            settings.paths.log_dir / "frontend.log",
            fd_options={"--listen-fd": self._listener.fileno()},
            starter=self._forks.fork,
        )
        self._child = child
        try:
            while True:
                self._note(await child.channel.receive())
        except Exception as error:
            if not isinstance(error, ChannelClosed):
                _logger.exception("a message of the frontend could not be handled")
                child.kill()
            child.channel.close()
            status = await child.wait()
            _logger.error("the frontend ended (%d)", status)
            self.is_ready = False
            self._child = None
            for future in self._serving.values():
                if not future.done():
                    future.set_result(None)  # the next frontend mounts everything anew
            self._on_down()

    def _note(self, message: m.FromFrontend) -> None:
        match message:
            case m.FrontendReady():
                self.is_ready = True
                self._keep(self._on_up(), "frontend-up")
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


def _settle(future: asyncio.Future[None], result: m.CallResult) -> None:
    if not result.error_code:
        future.set_result(None)
        return
    error: GpupoolError = error_from_code(
        result.error_code, result.error_message, result.error_hint
    )
    future.set_exception(error)
