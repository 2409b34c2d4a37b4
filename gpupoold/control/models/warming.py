"""Restoring snapshots of requested models to host memory and workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.engine_room import EnginesFull
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.placement import EnginePlacement
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import CachedSnapshot
from gpupoold.control.weights.host_budget import CacheFull
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.errors import GpupoolError, NoSuchModel, TimedOut, Unavailable
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

Bring = Callable[[ModelRow, list[Worker]], Awaitable[None]]


class Warmer:
    """Warms models: one attempt per model serves all waiting requests.

    A model is warm when its snapshot is in host memory and attached to all workers with its engine.
    A missing snapshot is read from disk; without a saved snapshot, a worker builds the engine again
    from the checkpoint. A model whose last engine was evicted is loaded again. If the snapshots of
    all degrees have no place in host memory, the workers of the other degrees rest.
    """

    def __init__(
        self,
        registry: Registry,
        history: History,
        fleet: Fleet,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        snapshots: ModelSnapshots,
        loader: ModelLoader,
        placement: EnginePlacement,
        failures: Failures,
        load_timeout_s: Callable[[], float],
    ) -> None:
        self._registry = registry
        self._history = history
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._snapshots = snapshots
        self._loader = loader
        self._placement = placement
        self._load_timeout_s = load_timeout_s
        self._failures = failures
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, model: str) -> asyncio.Task[None]:
        """Start warming; the task raises the reason of a failure."""
        return self._begin(model, self._bring)

    async def warm(self, model: str) -> None:
        """Return when the model is warm.

        Raises:
            GpupoolError: the reason of the failure.
        """
        if not self._fleet.is_warm(model) or self._fleet.snapshots.resting(model):
            # Other callers may wait for the same task: the end of one wait does not end the task.
            await asyncio.shield(self.begin(model))

    async def cancel(self, model: str) -> None:
        """Cancel the warming of a model under removal; its requests have ended before."""
        task = self._tasks.get(model)
        if task is not None:
            task.cancel()
            await asyncio.wait({task})

    async def stop(self) -> None:
        """Cancel all warming; the workers have stopped before."""
        for model in list(self._tasks):
            await self.cancel(model)

    def began(self, model: str) -> None:
        """Record a use; bring the snapshot of resting devices back if there is room now."""
        self._snapshots.touch(model)
        if self._fleet.snapshots.resting(model) and self._snapshots.fits_again(model):
            self.begin(model)

    def renew(self, message: m.WrongAnswer) -> None:
        """Renew the snapshot from the checkpoint: the saved snapshot may be damaged too."""
        model = message.model
        text = f"the self-check answered {list(message.answered)}, not {list(message.expected)}"
        self._history.record_event("error", "self_check_failed", model, text)
        self._dispatcher.accounts.meters.model(model).self_check_failures += 1
        self._dispatcher.fail_model(
            model, f"the weights of {model} were damaged; the model is reloaded"
        )
        self._begin(model, self._renew)

    def _workers_of(self, model: str) -> list[Worker]:
        """Return the workers that need the model's snapshot."""
        workers = self._supervisor.workers
        return [workers[number] for number in self._fleet.devices_with_snapshot(model)]

    def _begin(self, model: str, bring: Bring) -> asyncio.Task[None]:
        if model not in self._tasks:
            task = asyncio.create_task(self._warm(model, bring), name=f"warm-{model}")
            task.add_done_callback(_retrieve)
            self._tasks[model] = task
            if bring != self._bring or not self._fleet.is_warm(model):
                self._fleet.set_warming(model, is_warming=True)
        return self._tasks[model]

    def _ended(self, model: str) -> None:
        del self._tasks[model]
        self._fleet.set_warming(model, is_warming=False)

    async def _warm(self, model: str, bring: Bring) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        hosts = self._workers_of(model)
        was_cached = self._snapshots.has_any(model) and bring == self._bring
        try:
            row = await self._registry.get(model)
            if row is None:
                raise NoSuchModel(f"no model is named {model!r}")
            with self._snapshots.host_budget.holding(*self._fleet.needed_snapshots(model)):
                await bring(row, hosts)
        except GpupoolError as error:
            self._ended(model)
            is_evicted = self._fleet.availability(model).is_evicted
            if isinstance(error, WorkerEnded) and (is_evicted or self._workers_of(model)):
                # Another worker can do the work. Repeated crashes quarantine the model.
                self._begin(model, bring)
            elif hosts and not any(worker.is_ready for worker in hosts):
                # The requests wait until a restarted worker has loaded the model.
                self._dispatcher.go_on(model)
            else:
                await self._failed(model, error)
            raise
        except BaseException:
            self._ended(model)
            self._dispatcher.fail_waiting(model, f"{model} could not be warmed")
            raise
        self._ended(model)
        _logger.info("%s is warm after %.2f s", model, loop.time() - started_s)
        if not was_cached:
            numbers = [worker.number for worker in self._workers_of(model)]
            self._dispatcher.accounts.meters.warmed(model, numbers)
        self._dispatcher.go_on(model)

    async def _failed(self, model: str, error: GpupoolError) -> None:
        self._history.record_event("error", "warm_failed", model, str(error))
        self._dispatcher.fail_waiting(model, f"{model} could not be warmed: {error}")
        is_full = isinstance(error, (EnginesFull, TimedOut, Unavailable))
        now = self._fleet.availability(model)
        if not now.devices and not (now.is_evicted and is_full):
            await self._failures.not_loaded(model, error)

    async def _bring(self, row: ModelRow, hosts: list[Worker]) -> None:
        """Attach the snapshots to all workers with the model, for which there is memory.

        Raises:
            CacheFull: there is no memory for the snapshot of any degree.
        """
        model = row.spec.name
        if self._fleet.availability(model).is_evicted:
            await self._placement.load_first(row.spec, row.weight_bytes, self._load_timeout_s())
            return
        if not hosts:
            raise Unavailable(f"no worker has {model}", "see `gpupool ps` and `gpupool logs`")
        first = self._by_degree(model, hosts)[0][0]
        await self._snapshots.wait_for_memory(row.spec, first, row.weight_bytes)
        async with self._fleet.lock(model).alone():
            full: list[tuple[list[Worker], CacheFull]] = []
            groups = self._by_degree(model, self._workers_of(model))
            for workers in groups:  # none if all have died, and load the model after the restart
                try:
                    await self._bring_to(row, workers)
                except CacheFull as error:
                    full.append((workers, error))
            if full and len(full) == len(groups):
                raise full[0][1]
            for workers, problem in full:
                numbers = [worker.number for worker in workers]
                self._snapshots.rest(model, numbers, problem.message)

    async def _bring_to(self, row: ModelRow, workers: list[Worker]) -> None:
        """Attach the snapshot to the workers of one degree.

        Raises:
            CacheFull: there is no memory for the snapshot; the engines stay.
        """
        model, size = row.spec.name, row.weight_bytes
        await self._snapshots.reserve(row.spec, workers[0], size)
        snapshot = self._snapshots.cached(model, workers[0])
        snapshot = snapshot or await self._snapshots.read(row.spec, workers[0])
        if snapshot is None:
            worker = self._least_busy(workers)
            await self._loader.reload(row.spec, worker, size)
            snapshot = self._snapshots.cached(model, worker)
        if snapshot is not None:
            await self._hand_out(row, snapshot, workers)
        for worker in workers:
            if self._fleet.hosts.of(model, worker.number).has_snapshot:
                self._dispatcher.wake(model, worker.number)

    async def _renew(self, row: ModelRow, hosts: list[Worker]) -> None:
        """Make the model's snapshots again and attach the new ones to all workers not at rest."""
        model = row.spec.name
        async with self._fleet.lock(model).alone():
            await self._snapshots.renew(model)
            resting = self._fleet.snapshots.resting(model)
            hosts = [one for one in self._workers_of(model) if one.number not in resting]
            for workers in self._by_degree(model, hosts):
                for worker in workers[:1]:  # makes the snapshot for the others
                    await self._loader.reload(row.spec, worker, row.weight_bytes)
                await self._reload_all(row, workers[1:])

    def _by_degree(self, model: str, workers: list[Worker]) -> list[list[Worker]]:
        """Return the workers of each degree, first those whose snapshot is in host memory."""
        resting = self._fleet.snapshots.resting(model)
        by_degree: dict[int, list[Worker]] = {}
        for worker in sorted(
            workers,
            key=lambda one: (
                self._snapshots.cached(model, one) is None,
                one.number in resting,
            ),
        ):
            by_degree.setdefault(worker.device.num_gpus, []).append(worker)
        return list(by_degree.values())

    def _least_busy(self, workers: list[Worker]) -> Worker:
        return min(workers, key=lambda one: len(self._dispatcher.live.on_device(one.number)))

    async def _hand_out(
        self, row: ModelRow, snapshot: CachedSnapshot, workers: list[Worker]
    ) -> None:
        """Attach the snapshot to the workers of its degree; rebuild engines of another layout."""
        model, hosts = row.spec.name, self._fleet.hosts
        present = self._workers_of(model)
        lacking = [
            one
            for one in workers
            if one in present and not hosts.of(model, one.number).has_snapshot
        ]
        fitting = [
            one for one in lacking if hosts.of(model, one.number).layout_digest == snapshot.digest
        ]
        given = (self._give(worker, model, snapshot) for worker in fitting)
        for error in await asyncio.gather(*given, return_exceptions=True):
            if error is not None:
                raise error
        await self._reload_all(row, [one for one in lacking if one not in fitting])

    async def _reload_all(self, row: ModelRow, workers: list[Worker]) -> None:
        """Rebuild engines side by side; raise the first failure after the end of all."""
        reloads = (self._loader.reload(row.spec, one, row.weight_bytes) for one in workers)
        for error in await asyncio.gather(*reloads, return_exceptions=True):
            if error is not None:
                raise error

    async def _give(self, worker: Worker, model: str, snapshot: CachedSnapshot) -> None:
        try:
            await self._supervisor.give_snapshot(worker, model, snapshot)
        except GpupoolError:
            if worker.is_ready:
                raise
            # A dead worker gets the snapshot with the next load.


def _retrieve(task: asyncio.Task[None]) -> None:
    """Retrieve the task's error, because often no caller waits for the task."""
    if not task.cancelled():
        task.exception()
