"""Loads of registered models on new workers, at once or when host memory is free."""

from __future__ import annotations

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import find_model
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.host_budget import CacheFull
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import GpupoolError


class Reloads:
    """Loads registered models; several workers load concurrently."""

    def __init__(
        self,
        registry: Registry,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        snapshots: ModelSnapshots,
        loader: ModelLoader,
        mounts: ModelMounts,
        failures: Failures,
    ) -> None:
        self._registry = registry
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._snapshots = snapshots
        self._loader = loader
        self._mounts = mounts
        self._failures = failures

    async def worker_up(self, worker: Worker) -> None:
        """Load every registered model on a new worker."""
        self._history.record_event("info", "worker_ready", str(worker.number), "ready")
        self._dispatcher.worker_up(worker)
        async with self._fleet.changing.shared():
            rows = await self._snapshots.start_order(self._registry)
            await self._snapshots.restore(rows, worker)
            later = [row for row in rows if not await self._load_now(row, worker)]
            await self._mounts.publish()
        for row in later:  # the wait for memory must not delay other models
            try:
                await self.load_later(row.spec.name, worker)
            except GpupoolError as error:
                await self._failures.not_loaded(row.spec.name, error)
        await self._snapshots.tidy(self._registry)

    async def load_later(self, name: str, worker: Worker) -> None:
        """Load a model on a worker when host memory is free, unless the model is being removed.

        Raises:
            GpupoolError: the reason of the failure.
        """
        row = await self._registry.get(name)
        if row is None or self._fleet.is_draining(name):
            return
        with self._snapshots.host_budget.holding(name):
            await self._snapshots.wait_for_memory(row.spec, worker, row.weight_bytes)
            async with self._fleet.changing.shared():
                now = await self._registry.get(name)
                if now is not None and not self._fleet.is_draining(name):
                    await self._load_and_open(now, worker)

    async def load_everywhere(self, row: ModelRow) -> ModelRow:
        """Load a model on all workers when host memory is free, and open the model.

        Raises:
            NoSuchModel: the model has been removed.
            GpupoolError: the reason of the failure.
        """
        name, worker = row.spec.name, self._supervisor.workers[0]
        with self._snapshots.host_budget.holding(name):
            await self._snapshots.wait_for_memory(row.spec, worker, row.weight_bytes)
            async with self._fleet.changing.alone():
                row = await find_model(self._registry, name)
                if self._fleet.is_open(name):
                    return row
                await self._loader.load_everywhere(row.spec, row.weight_bytes)
                return await self._mounts.open(row.spec)

    async def _load_now(self, row: ModelRow, worker: Worker) -> bool:
        """Load a model on a new worker; return False if host memory is full now."""
        name = row.spec.name
        is_shut_out = self._fleet.breakers.is_shut_out(name)
        if self._fleet.is_draining(name) or not worker.is_ready or is_shut_out:
            return True
        try:
            await self._load_and_open(row, worker)
        except CacheFull:
            return False
        except GpupoolError as error:
            await self._failures.not_loaded(name, error)
        return True

    async def _load_and_open(self, row: ModelRow, worker: Worker) -> None:
        # Mounting is slow, and must be done once only, not for each worker.
        was_open = self._fleet.is_open(row.spec.name)
        self._fleet.loading(row.spec.name)
        await self._loader.load(row.spec, worker, row.weight_bytes)
        if not was_open:
            await self._mounts.open(row.spec)
