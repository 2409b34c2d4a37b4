"""Loads and unloads of models on workers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Iterator

from gpupoold.config.schema import Settings
from gpupoold.control.fleet.fleet import Fleet
from gpupoold.control.models.engine_room import EngineRoom
from gpupoold.control.models.facts import LoadFacts
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.models.specs import to_load
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.workers.worker import Worker, WorkerEnded
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError
from gpupoold.memory.prefix_files import remove_files
from gpupoold.memory.prefix_names import owners_of
from gpupoold.scheduling.hosting import HostingReason
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

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
        room: EngineRoom,
    ) -> None:
        self._settings = settings
        self._fleet = fleet
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._snapshots = snapshots
        self._mounts = mounts
        self._facts = facts
        self._room = room
        self._under_way: dict[tuple[str, int], asyncio.Event] = {}
        self._cleaning: set[asyncio.Task[None]] = set()

    async def load(
        self,
        spec: ModelSpec,
        worker: Worker,
        expected_bytes: int = 0,
        reason: HostingReason = HostingReason.NEEDED,
    ) -> None:
        """Load on one worker; return when the worker has the model, also by another load.

        A new snapshot takes about ``expected_bytes``, for which other snapshots are evicted. The
        first load makes the snapshot alone; other workers then load from the snapshot side by side.

        Raises:
            CacheFull: too few snapshots can be evicted now.
            EnginesFull: too few engines can be evicted for this ``reason``.
            GpupoolError: the worker's reason.
        """
        async with self._alone_with(spec.name, worker):
            lock = self._fleet.lock(spec.name)
            with self._snapshots.host_budget.holding(
                self._fleet.snapshots.of(spec.name, worker.number)
            ):
                while True:
                    async with lock.shared():
                        if self._has(worker, spec):
                            return
                        if self._snapshots.is_at_hand(spec.name, worker):
                            return await self._load(spec, worker, expected_bytes, reason)
                    async with lock.alone():
                        is_at_hand = self._snapshots.is_at_hand(spec.name, worker)
                        if not self._has(worker, spec) and not is_at_hand:
                            return await self._load(spec, worker, expected_bytes, reason)

    async def reload(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        """Replace the model's engine on a worker, using the snapshot if present.

        The caller holds the model and its lock.

        Raises:
            GpupoolError: the worker's reason; the worker no longer has the model.
        """
        try:
            await self._supervisor.unload(worker, spec.name)
            await self._load(spec, worker, expected_bytes, HostingReason.NEEDED)
        except BaseException:
            self._dispatcher.unhost(spec.name, worker)
            raise

    async def unload(self, name: str) -> None:
        """Unload the model from all frontends and workers, and forget its snapshots.

        Raises:
            TimedOut: a worker did not answer.
        """
        self._dispatcher.forget(name)
        async with self._fleet.lock(name).alone():
            await self._take_off(name)
            self._supervisor.forget_prefixes(name)
            if self._settings.memory.kv_files_bytes:
                await asyncio.to_thread(remove_files, self._settings.kv_folder, owners_of(name))
            await self._snapshots.forget(name)

    async def withdraw(self, name: str) -> None:
        """Unload the model from all frontends and workers, keeping the saved snapshot.

        Raises:
            TimedOut: a worker did not answer.
        """
        self._dispatcher.forget(name)
        async with self._fleet.lock(name).alone():
            await self._take_off(name)
            self._snapshots.drop(name)

    async def _take_off(self, name: str) -> None:
        self._mounts.unmount(name)
        unloads = (self._supervisor.unload(one, name) for one in self._supervisor.workers)
        await asyncio.gather(*unloads)

    @contextlib.asynccontextmanager
    async def _alone_with(self, name: str, worker: Worker) -> AsyncIterator[None]:
        """Exclude other loads of the model on the worker inside the context."""
        key = name, worker.number
        worker.num_loads += 1
        try:
            while (other := self._under_way.get(key)) is not None:
                await other.wait()
            ended = self._under_way[key] = asyncio.Event()
            try:
                yield
            finally:
                del self._under_way[key]
                ended.set()
        finally:
            worker.num_loads -= 1

    def _has(self, worker: Worker, spec: ModelSpec) -> bool:
        return self._fleet.hosts.of(spec.name, worker.number).is_ordered

    async def _load(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int, reason: HostingReason
    ) -> None:
        name = spec.name
        self._fleet.check_quarantine(name)
        spec = await self._facts.with_adapters(spec)
        snapshot = await self._snapshots.for_load(spec, worker, expected_bytes)
        loop = asyncio.get_running_loop()
        async with worker.load_lock:
            if self._has(worker, spec):
                return
            started_s = loop.time()
            await self._room.make(name, worker, reason)
            budget_s = await self._facts.profiling_budget_s(name, worker)
            try:
                loaded, fd = await self._supervisor.load(
                    worker,
                    to_load(spec, self._settings),
                    snapshot,
                    budget_s,
                    self._snapshots.kv_identity(spec, worker),
                )
                with _closing(fd) as kept:
                    await self._facts.keep_engine_bytes(name, worker, loaded)
                    self._fleet.check_quarantine(name)  # it may have crashed another worker
                    await self._room.settle(name, worker, reason)
                    if fd is not None:
                        kept.pop_all()  # closed by the cache, also after an error
                        await self._snapshots.keep(fd, worker, loaded, snapshot)
            except BaseException:
                self._clean_up(worker, name)  # the worker may still finish the load
                raise
        await self._facts.keep(spec, worker, loaded)
        await self._serve(spec, worker, loaded, reason)
        size, took_s = format_bytes(loaded.model.weight_bytes), loop.time() - started_s
        text = "%s loaded on worker %d in %.2f s: %s of weights, %s for the engine (%s)"
        engine = format_bytes(loaded.memory.device_bytes)
        _logger.info(text, name, worker.number, took_s, size, engine, reason.why)

    async def _serve(
        self, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded, reason: HostingReason
    ) -> None:
        costs = await self._facts.costs(spec.name, worker)
        if not self._has(worker, spec):
            raise WorkerEnded(f"worker {worker.number} ended", "see `gpupool logs`")
        self._fleet.hosts.of(spec.name, worker.number).why = reason.why
        self._dispatcher.host(spec.targets, loaded.model, costs, worker)

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


@contextlib.contextmanager
def _closing(fd: int | None) -> Iterator[contextlib.ExitStack]:
    """Close ``fd`` at the end of the context, unless the stack has been emptied."""
    with contextlib.ExitStack() as stack:
        if fd is not None:
            stack.callback(os.close, fd)
        yield stack
