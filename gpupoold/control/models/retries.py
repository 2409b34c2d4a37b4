"""Models that were shut out are loaded again when their wait is over."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerEnded, WorkerSupervisor
from gpupoold.errors import GpupoolError, Unavailable


class Retries:
    """Tries models again. ``load`` loads a model on a worker and lets it serve, unless it is
    being removed."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        load: Callable[[str, Worker], Awaitable[None]],
    ) -> None:
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._load = load

    async def try_again(self, name: str) -> None:
        """Load a model on the worker with the fewest requests, then on all that are ready.

        Raises:
            WorkerEnded: a worker died meanwhile; no other has been tried.
            Unavailable: no worker is ready.
            GpupoolError: why no worker can load it.
        """
        problem: GpupoolError | None = None
        for worker in self._ready():
            try:
                await self._load(name, worker)
            except WorkerEnded:
                raise
            except GpupoolError as error:
                problem = error
        if problem is not None and not self._dispatcher.routes.get(name):
            raise problem

    def _ready(self) -> list[Worker]:
        ready = [one for one in self._supervisor.workers if one.is_ready]
        if not ready:
            raise Unavailable("no worker is ready")
        live = self._dispatcher.live
        return sorted(ready, key=lambda one: len(live.on_device(one.number)))
