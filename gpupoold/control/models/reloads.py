"""Loads of registered models on new workers, at once or when host memory is free."""

from __future__ import annotations

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import find_model
from gpupoold.control.models.placement import EnginePlacement
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.host_budget import CacheFull
from gpupoold.control.workers.worker import Worker
from gpupoold.errors import GpupoolError


class Reloads:
    """Loads registered models; several workers load concurrently."""

    def __init__(
        self,
        registry: Registry,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        snapshots: ModelSnapshots,
        placement: EnginePlacement,
        mounts: ModelMounts,
        failures: Failures,
    ) -> None:
        self._registry = registry
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._snapshots = snapshots
        self._placement = placement
        self._mounts = mounts
        self._failures = failures

    async def worker_up(self, worker: Worker) -> None:
        """Load the registered models that a new worker should host."""
        self._history.record_event("info", "worker_ready", str(worker.number), "ready")
        self._dispatcher.worker_up(worker)
        rows = await self._snapshots.start_order(self._registry)
        await self._restore(rows, worker)
        names = [str(row.spec.name) for row in rows]
        later = []
        while names:
            name = self._next(names)
            if not await self._load_now(name, worker):
                later.append(name)
        await self._mounts.publish()
        for name in later:  # the wait for memory must not delay other models
            try:
                await self.load_later(name, worker)
            except GpupoolError as error:
                await self._failures.not_loaded(name, error)
        worker.has_loaded = worker.is_ready
        await self._snapshots.tidy(self._registry)

    async def load_later(self, name: str, worker: Worker) -> None:
        """Load a model on a worker when host memory is free, unless the model is being removed.

        Raises:
            GpupoolError: the reason of the failure.
        """
        row = await self._registry.get(name)
        if row is None or self._fleet.is_draining(name):
            return
        with self._snapshots.host_budget.holding(self._fleet.snapshots.of(name, worker.number)):
            await self._snapshots.wait_for_memory(row.spec, worker, row.weight_bytes)
            await self._placement.load_on(name, worker)

    async def load_anywhere(self, name: str) -> ModelRow:
        """Load a model without a device on one device when host memory is free; open the model.

        Further devices load the model in the background.

        Raises:
            NoSuchModel: the model has been removed.
            GpupoolError: the reason of the failure.
        """
        row = await find_model(self._registry, name)
        first = self._placement.first_worker(row)
        held = [] if first is None else [self._fleet.snapshots.of(name, first.number)]
        with self._snapshots.host_budget.holding(*held):
            if first is not None:
                await self._snapshots.wait_for_memory(row.spec, first, row.weight_bytes)
            async with self._fleet.changing(name).shared():
                row = await find_model(self._registry, name)
                if not self._fleet.is_open(name) and not self._fleet.is_draining(name):
                    await self._placement.load_first(row.spec, row.weight_bytes)
                    row = await self._mounts.open(row.spec)
        self._placement.spread_later(name)
        return row

    def _next(self, names: list[str]) -> str:
        """Remove and return the next model, if possible one that no other worker loads now."""
        free = (name for name in names if self._fleet.lock(name).is_free)
        name = next(free, names[0])
        names.remove(name)
        return name

    async def _restore(self, rows: list[ModelRow], worker: Worker) -> None:
        """Restore snapshots from the service manager, except those of models removed meanwhile."""
        await self._snapshots.restore(rows, worker)
        for row in rows:
            if not self._fleet.knows(row.spec.name):
                self._snapshots.drop(row.spec.name)

    async def _load_now(self, name: str, worker: Worker) -> bool:
        """Load a model on a new worker; return False if host memory is full now."""
        if not worker.is_ready or self._fleet.breakers.is_shut_out(name):
            return True
        try:
            await self._placement.load_on(name, worker)
        except CacheFull:
            return False
        except GpupoolError as error:
            await self._failures.not_loaded(name, error)
        return True
