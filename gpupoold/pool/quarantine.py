"""Models that have ended their workers again and again are served no more until asked for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpupool_state import History, Registry
from gpupoold.domain import ModelState
from gpupoold.errors import GpupoolError
from gpupoold.pool.blame import Blame, Death
from gpupoold.pool.dispatch import Dispatcher
from gpupoold.pool.loader import ModelLoader
from gpupoold.pool.warming import Warmer

_logger = logging.getLogger(__name__)


class Quarantine:
    """Charges deaths to models, and takes off all instances those that :class:`Blame` convicts."""

    def __init__(
        self,
        blame: Blame,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        loader: ModelLoader,
        warmer: Warmer,
        publish: Callable[[], Awaitable[None]],
    ) -> None:
        self._blame = blame
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._loader = loader
        self._warmer = warmer
        self._publish = publish
        self._tasks: set[asyncio.Task[None]] = set()

    def charge(self, model: str, device: int, death: Death) -> None:
        """A death was the model's fault. If it was one too many, its requests end now."""
        reason = self._blame.charge(model, device, death, time.monotonic())
        if reason is None:
            return
        self._history.record_event("error", "model_quarantined", model, reason)
        self._dispatcher.fail_model(model, f"{model} is in quarantine: it {reason}")
        self._dispatcher.forget(model)
        task = asyncio.create_task(self._take_off(model, reason), name=f"quarantine-{model}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Leave what is under way; the instances have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take_off(self, model: str, reason: str) -> None:
        try:
            if await self._registry.get(model) is not None:
                await self._registry.set_state(model, ModelState.FAILED, reason)
            await self._publish()
            await self._warmer.cancel(model)
            await self._loader.withdraw(model)
        except GpupoolError as error:
            _logger.error("%s could not be taken off all instances: %s", model, error)
