"""Restoring snapshots of requested models to host memory and workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from gpupool_state import History, ModelRow, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError, NoSuchModel, Unavailable
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

Bring = Callable[[ModelRow, list[Worker]], Awaitable[None]]


class Warmer:
    """Warms models: one attempt per model serves all waiting requests.

    A model is warm when its snapshot is in host memory and attached to all workers with its engine.
    A missing snapshot is read from disk; without a saved snapshot, a worker builds the engine again
    from the checkpoint.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        cache: SnapshotCache,
        loader: ModelLoader,
        on_lost: Callable[[str, GpupoolError], Awaitable[None]],
    ) -> None:
        """``on_lost`` gets the name of a model without any worker, and the reason."""
        self._settings = settings
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
        self._room = loader.room
        self._loader = loader
        self._on_lost = on_lost
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def is_warm(self, model: str) -> bool:
        """Return whether the model is warm; a model whose workers need no snapshot always is."""
        if model in self._tasks:
            return False
        hosts = self._hosts(model)
        if not hosts:
            return True
        return self._cache.get(model) is not None and all(model in one.snapshots for one in hosts)

    def begin(self, model: str) -> asyncio.Task[None]:
        """Start warming; the task raises the reason of a failure."""
        return self._begin(model, self._bring)

    def damaged(self, message: m.WrongAnswer) -> None:
        """Renew the model's snapshot from the checkpoint, as the saved snapshot may be wrong
        too.
        """
        model = message.model
        text = f"its self-check answered {list(message.answered)}, not {list(message.expected)}"
        self._history.record_event("error", "self_check_failed", model, text)
        self._dispatcher.accounts.meters.model(model).self_check_failures += 1
        self._dispatcher.fail_model(model, f"the weights of {model} were damaged; it is reloaded")
        self._begin(model, self._renew)

    def used(self, model: str) -> None:
        self._cache.touch(model)

    def left(self, model: str) -> None:
        self._cache.touch(model)
        if not self._dispatcher.live.num_of(model):
            self._room.changed()

    async def warm(self, model: str) -> None:
        """Return when the model is warm.

        Raises:
            GpupoolError: the reason of the failure.
        """
        if not self.is_warm(model):
            # Others may wait for it too: who gives up does not end it.
            await asyncio.shield(self.begin(model))

    async def cancel(self, model: str) -> None:
        """Cancel the warming of a model under removal; its requests have ended before."""
        task = self._tasks.get(model)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        """Give all up; the workers have stopped before."""
        for model in list(self._tasks):
            await self.cancel(model)

    def _least_busy(self, workers: list[Worker]) -> Worker:
        return min(workers, key=lambda one: len(self._dispatcher.live.on_device(one.number)))

    def _hosts(self, model: str) -> list[Worker]:
        """Return the workers that need the model's snapshot."""
        hosts = self._dispatcher.routes.get(model, [])
        return [worker for worker in hosts if worker.device.kind != "sim"]

    def _begin(self, model: str, bring: Bring) -> asyncio.Task[None]:
        if model not in self._tasks:
            task = asyncio.create_task(self._warm(model, bring), name=f"warm-{model}")
            task.add_done_callback(_retrieve)
            self._tasks[model] = task
        return self._tasks[model]

    async def _warm(self, model: str, bring: Bring) -> None:
        started_s = time.monotonic()
        hosts = self._hosts(model)
        was_cached = self._cache.get(model) is not None and bring == self._bring
        try:
            row = await self._registry.get(model)
            if row is None:
                raise NoSuchModel(f"no model is named {model!r}")
            with self._room.holding(model):
                await bring(row, hosts)
        except GpupoolError as error:
            del self._tasks[model]
            if isinstance(error, WorkerEnded) and self._hosts(model):
                # On another that is there. Who dies of it again and again is in quarantine.
                self._begin(model, bring)
            elif hosts and not any(worker.is_ready for worker in hosts):
                # They load it when they come back: its requests wait for that.
                self._dispatcher.go_on(model)
            else:
                await self._failed(model, error)
            raise
        except BaseException:
            del self._tasks[model]
            self._dispatcher.fail_waiting(model, f"{model} could not be warmed")
            raise
        del self._tasks[model]
        _logger.info("%s is warm after %.2f s", model, time.monotonic() - started_s)
        if not was_cached:
            self._dispatcher.accounts.meters.warmed(
                model, [one.number for one in self._hosts(model)]
            )
        self._dispatcher.go_on(model)

    async def _failed(self, model: str, error: GpupoolError) -> None:
        self._history.record_event("error", "warm_failed", model, str(error))
        self._dispatcher.fail_waiting(model, f"{model} could not be warmed: {error}")
        if not self._dispatcher.routes.get(model):
            await self._on_lost(model, error)

    async def _bring(self, row: ModelRow, hosts: list[Worker]) -> None:
        """Attach the snapshot to all workers with the model."""
        model = row.spec.name
        if not hosts:
            raise Unavailable(f"no worker has {model}", "see `gpupool ps` and `gpupool logs`")
        size = row.weight_bytes
        patience_s = self._settings.limits.load_timeout_s
        await self._loader.wait_for_room(row.spec, hosts[0], size, patience_s)
        async with self._loader.lock(model):
            hosts = self._hosts(model)
            if not hosts:
                return  # they have died meanwhile, and load it when they come back
            snapshot = self._cache.get(model) or await self._read(row.spec, hosts)
            if snapshot is None:
                await self._loader.reload(row.spec, self._least_busy(hosts), size)
                snapshot = self._cache.get(model)
            if snapshot is not None:
                await self._hand_out(row, snapshot)

    async def _renew(self, row: ModelRow, hosts: list[Worker]) -> None:
        """Make the model's snapshot again and attach the new snapshot to all its workers."""
        async with self._loader.lock(row.spec.name):
            self._loader.forget_snapshot(row.spec.name)
            for worker in self._hosts(row.spec.name):
                await self._loader.reload(row.spec, worker, row.weight_bytes)

    async def _read(self, spec: ModelSpec, hosts: list[Worker]) -> CachedSnapshot | None:
        ready = hosts[0].ready
        assert ready is not None
        return await self._loader.read_snapshot(spec, ready)

    async def _hand_out(self, row: ModelRow, snapshot: CachedSnapshot) -> None:
        """Attach the snapshot to all workers; rebuild engines of another layout."""
        model = row.spec.name
        lacking = [one for one in self._hosts(model) if model not in one.snapshots]
        fitting = [one for one in lacking if one.layouts.get(model) == snapshot.digest]
        given = (self._give(worker, model, snapshot) for worker in fitting)
        for error in await asyncio.gather(*given, return_exceptions=True):
            if error is not None:
                raise error
        for worker in lacking:
            if worker not in fitting:
                await self._loader.reload(row.spec, worker, row.weight_bytes)

    async def _give(self, worker: Worker, model: str, snapshot: CachedSnapshot) -> None:
        try:
            await self._supervisor.give_snapshot(worker, model, snapshot)
        except GpupoolError:
            if worker.is_ready:
                raise
            # It has died, and has the snapshot when it has loaded the model again.


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, because a warming often has no waiter."""
    if not task.cancelled():
        task.exception()
