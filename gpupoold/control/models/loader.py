"""Loads and unloads of models on workers."""

from __future__ import annotations

import asyncio
import logging

from gpupoold.config.schema import Settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.facts import LoadFacts
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.models.specs import to_load
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError
from gpupoold.units import format_bytes

_logger = logging.getLogger(__name__)


class ModelLoader:
    """Loads models on workers, which then accept requests of the models, and unloads models."""

    def __init__(
        self,
        settings: Settings,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        snapshots: ModelSnapshots,
        mounts: ModelMounts,
        facts: LoadFacts,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._snapshots = snapshots
        self._mounts = mounts
        self._facts = facts
        self._cleaning: set[asyncio.Task[None]] = set()

    async def load_everywhere(self, spec: ModelSpec, expected_bytes: int = 0) -> None:
        """Load on every worker that is not down; see :meth:`load`.

        A worker that is down loads the model when the worker comes up.

        Raises:
            GpupoolError: the first failure; the caller must call ``unload``.
        """
        with self._snapshots.host_budget.holding(spec.name):
            for worker in self._supervisor.up:
                await self._supervisor.wait_ready(worker)
                await self.load(spec, worker, expected_bytes)
        self._dispatcher.check_servable()

    async def load(self, spec: ModelSpec, worker: Worker, expected_bytes: int = 0) -> None:
        """Load on one worker; no effect if the worker has the model.

        A new snapshot takes about ``expected_bytes``, for which other snapshots are evicted.

        Raises:
            CacheFull: too few snapshots can be evicted now.
            GpupoolError: the worker's reason.
        """
        with self._snapshots.host_budget.holding(spec.name):
            async with self._fleet.lock(spec.name):
                if not self._fleet.hosts.of(spec.name, worker.number).is_ordered:
                    await self._load(spec, worker, expected_bytes)

    async def reload(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        """Replace the model's engine on a worker, using the snapshot if present.

        The caller holds the model and its lock.

        Raises:
            GpupoolError: the worker's reason; the worker no longer has the model.
        """
        try:
            await self._supervisor.unload(worker, spec.name)
            await self._load(spec, worker, expected_bytes)
        except BaseException:
            self._dispatcher.unhost(spec.name, worker)
            raise

    async def unload(self, name: str) -> None:
        """Unload the model from all frontends and workers, and forget its snapshots.

        Raises:
            TimedOut: a worker did not answer.
        """
        self._dispatcher.forget(name)
        async with self._fleet.lock(name):
            await self._take_off(name)
            self._snapshots.forget(name)

    async def withdraw(self, name: str) -> None:
        """Unload the model from all frontends and workers, keeping the saved snapshot.

        Raises:
            TimedOut: a worker did not answer.
        """
        self._dispatcher.forget(name)
        async with self._fleet.lock(name):
            await self._take_off(name)
            self._snapshots.drop(name)

    async def _take_off(self, name: str) -> None:
        self._mounts.unmount(name)
        for worker in self._supervisor.workers:
            await self._supervisor.unload(worker, name)

    async def _load(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        name = spec.name
        self._fleet.check_quarantine(name)
        spec = await self._facts.with_adapters(spec)
        snapshot = await self._snapshots.for_load(spec, worker, expected_bytes)
        budget_s = await self._facts.profiling_budget_s(name, worker)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            loaded, fd = await self._supervisor.load(
                worker, to_load(spec, self._settings), snapshot, budget_s
            )
            self._fleet.check_quarantine(name)  # the model may have crashed another worker
            if fd is not None:
                await self._snapshots.keep(fd, loaded, snapshot)
        except BaseException:
            self._clean_up(worker, name)  # the worker may still finish the load
            raise
        await self._facts.keep(spec, worker, loaded)
        costs = await self._facts.costs(name, worker)
        if not self._fleet.hosts.of(name, worker.number).is_ordered:
            raise WorkerEnded(f"worker {worker.number} ended", "see `gpupool logs`")
        self._dispatcher.host(spec.targets, loaded.model, costs, worker)
        size, took_s = format_bytes(loaded.model.weight_bytes), loop.time() - started_s
        text = "%s loaded on worker %d in %.2f s: %s of weights"
        _logger.info(text, name, worker.number, took_s, size)

    def _clean_up(self, worker: Worker, name: str) -> None:
        """Unload a partly loaded model in the background; a later load waits for the end."""
        task = asyncio.create_task(self._unload_quietly(worker, name))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _unload_quietly(self, worker: Worker, name: str) -> None:
        try:
            await self._supervisor.unload(worker, name)
        except GpupoolError as error:
            _logger.error("%s", error)
