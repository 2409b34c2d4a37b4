"""Loaded models: workers, snapshots and mounts."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import defaultdict

from gpupool_state import History, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.frontends.frontend import Frontend
from gpupoold.control.frontends.frontends import Frontends
from gpupoold.control.models.circuit_breaker import CircuitBreakers
from gpupoold.control.models.profiles import is_profiled, latency_model_of, profile_rows
from gpupoold.control.models.specs import to_load
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache
from gpupoold.control.weights.host_budget import SnapshotRoom
from gpupoold.control.weights.saved_snapshots import SavedSnapshots
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.errors import Failed, GpupoolError
from gpupoold.latency.errors import LatencyError
from gpupoold.scheduling.costs import ModelCosts, costs_of
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

# How long a model may keep a device to itself while its steps are timed. What is played by
# a CPU is small and for trying things out: adding a model shall be quick there.
# What is simulated keeps to a law that it can tell at once.
_PROFILING_BUDGET_S = {"cuda": 3.0, "emulated": 1.0, "sim": 1.0}


class ModelLoader:
    """Loads models on workers, unloads models, and routes requests."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        cache: SnapshotCache,
        saved: SavedSnapshots,
        breakers: CircuitBreakers,
    ) -> None:
        self._breakers = breakers
        self._settings = settings
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
        self._saved = saved
        self.room = SnapshotRoom(cache, self._is_in_use, self._let_go)
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._cleaning: set[asyncio.Task[None]] = set()
        self._loaded: dict[str, m.LoadedModel] = {}
        self._served: set[str] = set()
        self.frontends: Frontends | None = None

    def is_loaded(self, name: str) -> bool:
        """Return whether the model has been loaded since the daemon started."""
        return name in self._loaded

    def is_open(self, name: str) -> bool:
        """Return whether a worker has the model and its API is mounted."""
        return name in self._served and bool(self._dispatcher.routes.get(name))

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock for changes of a model's workers and snapshot."""
        return self._locks[name]

    async def load_everywhere(self, spec: ModelSpec, expected_bytes: int = 0) -> None:
        """Load on every worker; see :meth:`load`.

        Raises:
            GpupoolError: the first reason why not; call ``unload`` then.
        """
        with self.room.holding(spec.name):
            for worker in self._supervisor.workers:
                await self._supervisor.wait_ready(worker)
                await self.load(spec, worker, expected_bytes)
        self._dispatcher.check_servable()

    async def load(self, spec: ModelSpec, worker: Worker, expected_bytes: int = 0) -> None:
        """Load on one worker; no effect if the worker has the model.

        A snapshot that must be made takes about ``expected_bytes``, for which other snapshots are
        evicted.

        Raises:
            NoRoom: too few snapshots can be evicted now.
            GpupoolError: the worker's reason.
        """
        with self.room.holding(spec.name):
            async with self.lock(spec.name):
                if spec.name not in worker.models:
                    await self._load(spec, worker, expected_bytes)

    async def wait_for_room(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int, wait_s: float
    ) -> None:
        """Reserve host memory for the model's snapshot, unless present; the caller holds the
        model.

        The caller may hold no lock, because other tasks may need the lock to finish and free
        memory.

        Raises:
            NoRoom, TimedOut: see :meth:`SnapshotRoom.reserve`.
        """
        is_sim = worker.device.kind == "sim"
        if is_sim or worker.ready is None or self._cache.get(spec.name) is not None:
            return
        saved_bytes = await self._saved.look_up(to_load(spec, self._settings), worker.ready)
        num_bytes = saved_bytes or _whole_pages(expected_bytes, worker)
        await self.room.reserve(spec.name, num_bytes, wait_s)

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

    async def read_snapshot(self, spec: ModelSpec, ready: m.WorkerReady) -> CachedSnapshot | None:
        """Read the model's snapshot from disk into the cache; return None if there is none.

        The caller holds the model and its lock.

        Raises:
            NoRoom: too few snapshots can be evicted now.
        """
        num_bytes = await self._saved.look_up(to_load(spec, self._settings), ready)
        if num_bytes is None:
            return None
        await self.room.reserve(spec.name, num_bytes)
        started_s = time.monotonic()
        saved = await self._saved.read(spec.name)
        if saved is None:
            return None
        _logger.info(
            "%s: its snapshot of %s was read in %.2f s",
            spec.name,
            format_bytes(saved.num_bytes),
            time.monotonic() - started_s,
        )
        return self._cache.put(spec.name, saved.fd, saved.layout_digest, saved.self_check)

    def forget_snapshot(self, name: str) -> None:
        """Drop the daemon's snapshot of a model, and the saved snapshot."""
        self._cache.drop(name)
        self._saved.forget(name)

    def _is_in_use(self, name: str) -> bool:
        return self._dispatcher.live.num_of(name) > 0

    async def _let_go(self, name: str) -> None:
        """Return when no process but the daemon has the model's snapshot."""
        await self._saved.settled(name)  # else its writer would keep the memory
        workers = self._supervisor.workers
        await asyncio.gather(*(self._supervisor.drop_snapshot(one, name) for one in workers))

    async def _load(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        name = spec.name
        self._check_quarantine(name)
        snapshot = await self._snapshot(spec, worker, expected_bytes)
        budget_s = await self._profiling_budget_s(spec, worker)
        model = to_load(spec, self._settings)
        started_s = time.monotonic()
        try:
            loaded, fd = await self._supervisor.load(worker, model, snapshot, budget_s)
            self._check_quarantine(name)  # another worker may have died of it meanwhile
            if fd is not None:
                kept = await self._keep_snapshot(fd, loaded)
                if snapshot is None or loaded.snapshot_problem:
                    self._saved.keep(name, kept)
        except BaseException:
            self._clean_up(worker, name)  # something may still come of it
            raise
        self._loaded[name] = loaded.model
        await self._registry.set_loaded(
            name,
            architecture=loaded.model.architecture,
            weight_bytes=loaded.model.weight_bytes,
            kv_bytes_per_token=loaded.model.kv_bytes_per_token,
            max_model_len=loaded.model.max_model_len,
        )
        await self._keep_profile(spec, worker, loaded)
        costs = await self._costs(name, worker)
        self._dispatcher.host(spec.targets, loaded.model, costs, worker)
        _logger.info(
            "%s loaded on worker %d in %.2f s: %s of weights",
            name,
            worker.number,
            time.monotonic() - started_s,
            format_bytes(loaded.model.weight_bytes),
        )

    def _check_quarantine(self, name: str) -> None:
        reason = self._breakers.reason(name)
        if reason is not None:
            raise Failed(f"{name} {reason}", f"`gpupool cache warm {name}` tries it again")

    async def _costs(self, name: str, worker: Worker) -> ModelCosts | None:
        """Return the model's costs for the scheduling core, None while unknown."""
        row = await self._registry.get(name)
        if row is None or worker.ready is None:
            return None
        try:
            latency = latency_model_of(row, worker.ready.device_name)
        except LatencyError as error:
            _logger.warning("%s: what is stored of its latency is unusable: %s", name, error)
            return None
        return costs_of(latency) if latency is not None else None

    async def _snapshot(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int
    ) -> CachedSnapshot | None:
        """Return the model's snapshot, reading the disk if needed.

        None means that the worker must make the snapshot, for which host memory is reserved.
        """
        name, ready = spec.name, worker.ready
        if worker.device.kind == "sim" or ready is None:
            return None
        snapshot = self._cache.get(name) or await self.read_snapshot(spec, ready)
        if snapshot is None:
            await self.room.reserve(name, _whole_pages(expected_bytes, worker))
        return snapshot

    async def _keep_snapshot(self, fd: int, loaded: m.ModelLoaded) -> CachedSnapshot:
        name = loaded.model.name
        if loaded.snapshot_problem:
            self._history.record_event("error", "snapshot_refused", name, loaded.snapshot_problem)
        try:
            # What was expected was an estimate.
            await self.room.reserve(name, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        return self._cache.put(name, fd, loaded.layout_digest, loaded.self_check)

    def _clean_up(self, worker: Worker, name: str) -> None:
        """Unload what is left of a model on a worker; a later load waits for the end."""
        task = asyncio.create_task(self._unload_quietly(worker, name))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _unload_quietly(self, worker: Worker, name: str) -> None:
        try:
            await self._supervisor.unload(worker, name)
        except GpupoolError as error:
            _logger.error("%s", error)

    async def _profiling_budget_s(self, spec: ModelSpec, worker: Worker) -> float:
        """Return the time for profiling: models are profiled once per kind of device."""
        row = await self._registry.get(spec.name)
        known = row is None or worker.ready is None or is_profiled(row, worker.ready)
        return 0.0 if known else _PROFILING_BUDGET_S[worker.device.kind]

    async def _keep_profile(self, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded) -> None:
        """Store the measured profile; a model without a profile can serve too."""
        measured, ready = loaded.profile, worker.ready
        if measured is None or ready is None:
            return
        problem = measured.problem
        try:
            rows = profile_rows(measured, loaded.model, spec.revision, ready, time.time())
            await self._registry.set_profiles(spec.name, rows)
        except GpupoolError as error:
            problem = f"{problem}; {error}" if problem else str(error)
        if problem:
            self._history.record_event("warning", "profile_incomplete", spec.name, problem)

    async def serve(self, spec: ModelSpec) -> None:
        """Mount or remount the model's API on all frontends.

        Raises:
            GpupoolError: the frontends' reason.
        """
        if self.frontends is not None:
            await self.frontends.serve(to_load(spec, self._settings), self._loaded[spec.name])
        self._served.add(spec.name)

    async def serve_on(self, frontend: Frontend, spec: ModelSpec) -> None:
        """Mount the model's API on a new frontend.

        Raises:
            GpupoolError: the frontend's reason.
        """
        await frontend.serve(to_load(spec, self._settings), self._loaded[spec.name])
        self._served.add(spec.name)

    async def unload(self, name: str) -> None:
        """Unload the model from all frontends and workers, and drop its snapshots."""
        self._dispatcher.forget(name)
        async with self.lock(name):
            await self._take_off(name)
            self._cache.forget(name)
            self._saved.forget(name)
        self.room.changed()

    async def withdraw(self, name: str) -> None:
        """Unload the model from all frontends and workers, keeping the saved snapshot.

        Raises:
            TimedOut: a worker did not answer.
        """
        self._dispatcher.forget(name)
        async with self.lock(name):
            await self._take_off(name)
            self._cache.drop(name)
        self.room.changed()

    async def _take_off(self, name: str) -> None:
        self._loaded.pop(name, None)
        self._served.discard(name)
        if self.frontends is not None:
            self.frontends.send(m.StopServing(name))
        for worker in self._supervisor.workers:
            await self._supervisor.unload(worker, name)


def _whole_pages(num_bytes: int, worker: Worker) -> int:
    """Return the host memory of a snapshot of ``num_bytes``, in whole pages."""
    page_bytes = worker.ready.page_bytes if worker.ready is not None else 1
    return -(-num_bytes // page_bytes) * page_bytes
