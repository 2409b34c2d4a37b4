"""Retries of failed models and of models in quarantine."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.reloads import Reloads
from gpupoold.control.workers.worker import WorkerEnded
from gpupoold.errors import GpupoolError, NoSuchModel, Unavailable

_logger = logging.getLogger(__name__)


class Retries:
    """Loads a model again when its wait is over.

    ``clock`` returns seconds of the monotonic clock.
    """

    def __init__(
        self,
        fleet: Fleet,
        reloads: Reloads,
        failures: Failures,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
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
            await self._reloads.load_anywhere(model)
            await self._failures.postpone(model, began_s)  # no effect unless the load was skipped
        except NoSuchModel:
            pass  # removed meanwhile
        except (WorkerEnded, Unavailable) as error:
            # A crash has opened the breaker; otherwise the retry was inconclusive.
            _logger.warning("the retry of %s was inconclusive: %s", model, error)
            await self._failures.postpone(model, self._clock())
        except GpupoolError as error:
            await self._failures.failed_again(model, error, began_s)
