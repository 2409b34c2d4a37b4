"""Retries of models in quarantine."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import GpupoolError, Unavailable


class Retries:
    """Loads a model on one worker after another.

    ``load`` loads a model on a worker and opens the model for requests, unless the model is being
    removed.
    """

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
        """Load a model on the worker with the fewest requests, then on all ready workers.

        Raises:
            WorkerEnded: a worker died meanwhile; no other worker has been tried.
            Unavailable: no worker is ready.
            GpupoolError: the reason why no worker can load the model.
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
