"""Retries of failed models and of models in quarantine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.reloads import Reloads
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import GpupoolError, Unavailable

_logger = logging.getLogger(__name__)


class Retries:
    """Loads a model on one worker after another when its wait is over.

    ``clock`` returns seconds of the monotonic clock.
    """

    def __init__(
        self,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        reloads: Reloads,
        failures: Failures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._reloads = reloads
        self._failures = failures
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    def check(self, now_s: float) -> None:
        """Retry the models whose wait is over; to be called every second."""
        for model in self._fleet.breakers.due(now_s):
            self._fleet.breakers.half_open(model)
            task = asyncio.create_task(self._retry(model), name=f"retry-{model}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Abandon work in progress; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _retry(self, model: str) -> None:
        began_s = self._clock()
        try:
            await self._try_again(model)
            await self._failures.postpone(model, began_s)  # no effect unless the load was skipped
        except (WorkerEnded, Unavailable) as error:
            # A crash has opened the breaker; otherwise the retry was inconclusive.
            _logger.warning("the retry of %s was inconclusive: %s", model, error)
            await self._failures.postpone(model, self._clock())
        except GpupoolError as error:
            await self._failures.failed_again(model, error, began_s)

    async def _try_again(self, model: str) -> None:
        """Load a model on the worker with the fewest requests, then on all ready workers.

        Raises:
            WorkerEnded: a worker died meanwhile; no other worker has been tried.
            Unavailable: no worker is ready.
            GpupoolError: the reason why no worker can load the model.
        """
        problem: GpupoolError | None = None
        for worker in self._ready():
            try:
                await self._reloads.load_later(model, worker)
            except WorkerEnded:
                raise
            except GpupoolError as error:
                problem = error
        if problem is not None and not self._fleet.availability(model).devices:
            raise problem

    def _ready(self) -> list[Worker]:
        ready = [one for one in self._supervisor.workers if one.is_ready]
        if not ready:
            raise Unavailable("no worker is ready")
        live = self._dispatcher.live
        return sorted(ready, key=lambda one: len(live.on_device(one.number)))
