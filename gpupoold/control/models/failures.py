"""Models that cannot serve: no worker could load the model, or none may load the model."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

from gpupool_state import History, Registry
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.domain import ModelState
from gpupoold.errors import GpupoolError


class Failures:
    """Records failures of models, and the time of the next try.

    ``clock`` and ``wall_clock`` return seconds.
    """

    def __init__(
        self,
        registry: Registry,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        mounts: ModelMounts,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._mounts = mounts
        self._clock = clock
        self._wall_clock = wall_clock

    async def not_loaded(self, model: str, error: GpupoolError) -> None:
        """Record that a worker could not load a model; without another worker the model has
        failed.
        """
        if not self._fleet.knows(model):
            return  # removed meanwhile
        self._history.record_event("error", "model_failed", model, str(error))
        if self._fleet.availability(model).devices:
            await self._mounts.publish()
            return
        self._dispatcher.fail_model(model, f"{model} could not be loaded: {error}")
        await self.failed(model, str(error))

    async def failed(self, model: str, reason: str) -> None:
        """Record that no worker could load a model; a retry follows."""
        breakers = self._fleet.breakers
        if breakers.retry_at_s(model) is None:
            breakers.open(model, reason, self._clock(), is_blocking=False)
        await self.record(model, reason)

    async def failed_again(self, model: str, error: GpupoolError, began_s: float) -> None:
        """Record that a retry, which began at ``began_s``, has failed: the next wait is longer."""
        self._fleet.breakers.open(model, str(error), began_s, is_blocking=False)
        self._history.record_event("error", "model_failed", model, str(error))
        await self.record(model, str(error))

    async def postpone(self, model: str, now_s: float) -> None:
        """Delay the next try after an inconclusive try; no effect on a ready model."""
        self._fleet.breakers.postpone(model, now_s)
        await self._mounts.publish()

    async def record(self, model: str, reason: str) -> None:
        """Record that a model cannot serve, and publish the reason."""
        text = self.with_time(model, reason)
        self._fleet.fail(model, text)
        if await self._registry.get(model) is not None:
            await self._registry.set_state(model, ModelState.FAILED, text)
        await self._mounts.publish()

    def with_time(self, model: str, reason: str) -> str:
        """Return the reason together with the time of the next try."""
        retry_at_s = self._fleet.breakers.retry_at_s(model)
        if retry_at_s is None:
            return reason
        at = datetime.fromtimestamp(self._wall_clock() + retry_at_s - self._clock()).astimezone()
        return f"{reason}; next try at {at:%H:%M:%S}"
