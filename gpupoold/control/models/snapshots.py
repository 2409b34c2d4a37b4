"""The weights snapshots of registered models: in host memory, on disk, and on the workers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence

import msgspec

from gpupool_state import History, ModelRow, Registry
from gpupoold.config.schema import Settings
from gpupoold.control.live_requests import LiveRequests
from gpupoold.control.models.specs import to_load
from gpupoold.control.models.startup import rows_in_start_order
from gpupoold.control.weights.cache import CachedSnapshot, SnapshotCache
from gpupoold.control.weights.fd_store import StoredSnapshots
from gpupoold.control.weights.host_budget import CacheSetting, HostMemoryBudget
from gpupoold.control.weights.saved_snapshots import SavedSnapshots
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class ModelSnapshots:
    """Finds, keeps and drops the snapshots of models; ``host_budget`` evicts snapshots."""

    def __init__(
        self,
        settings: Settings,
        history: History,
        live: LiveRequests,
        supervisor: WorkerSupervisor,
        cache: SnapshotCache,
        saved: SavedSnapshots,
        stored: StoredSnapshots,
        setting: Callable[[], CacheSetting] = CacheSetting,
    ) -> None:
        """``setting`` returns the origin of the model cache's size, for messages."""
        self._settings = settings
        self._history = history
        self._live = live
        self._supervisor = supervisor
        self._cache = cache
        self._saved = saved
        self._stored = stored
        self.host_budget = HostMemoryBudget(cache, self.is_in_use, self._drop_from_workers, setting)

    def is_in_use(self, model: str) -> bool:
        return self._live.num_of(model) > 0

    def cached(self, model: str) -> CachedSnapshot | None:
        """Return the model's snapshot if in host memory."""
        return self._cache.get(model)

    def touch(self, model: str) -> None:
        """Record a use of the model, which may have become idle."""
        self._cache.touch(model)
        if not self.is_in_use(model):
            self.host_budget.changed()

    async def wait_for_memory(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        """Reserve host memory for the model's snapshot, unless present.

        The caller holds the model, but no lock, because other tasks may need the lock to finish and
        free memory.

        Raises:
            CacheFull, TimedOut: see :meth:`HostMemoryBudget.reserve`.
        """
        is_sim = worker.device.kind == "sim"
        if is_sim or worker.ready is None or self._cache.get(spec.name) is not None:
            return
        saved_bytes = await self._saved.look_up(to_load(spec, self._settings), worker.ready)
        num_bytes = saved_bytes or _whole_pages(expected_bytes, worker)
        await self.host_budget.reserve(spec.name, num_bytes, self._settings.limits.load_timeout_s)

    async def for_load(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int
    ) -> CachedSnapshot | None:
        """Return the model's snapshot, reading the disk if needed.

        If the result is None, the worker must make the snapshot; host memory is then reserved.

        Raises:
            CacheFull: too few snapshots can be evicted now.
        """
        name, ready = spec.name, worker.ready
        if worker.device.kind == "sim" or ready is None:
            return None
        snapshot = self._cache.get(name) or await self.read(spec, ready)
        if snapshot is None:
            await self.host_budget.reserve(name, _whole_pages(expected_bytes, worker))
        return snapshot

    async def read(self, spec: ModelSpec, ready: m.WorkerReady) -> CachedSnapshot | None:
        """Read the model's snapshot from disk into the cache; return None if there is none.

        The caller holds the model and its lock.

        Raises:
            CacheFull: too few snapshots can be evicted now.
        """
        num_bytes = await self._saved.look_up(to_load(spec, self._settings), ready)
        if num_bytes is None:
            return None
        await self.host_budget.reserve(spec.name, num_bytes)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        saved = await self._saved.read(spec.name)
        if saved is None:
            return None
        size, took_s = format_bytes(saved.num_bytes), loop.time() - started_s
        _logger.info("%s: snapshot of %s read in %.2f s", spec.name, size, took_s)
        return self._cache.put(spec.name, saved.fd, saved.layout_digest, saved.self_check)

    async def keep(self, fd: int, loaded: m.ModelLoaded, given: CachedSnapshot | None) -> None:
        """Keep the snapshot from a worker; ``given`` is the snapshot sent with the load, or None.

        Raises:
            CacheFull: too few snapshots can be evicted now; ``fd`` is closed.
        """
        name = loaded.model.name
        if loaded.snapshot_problem:
            self._history.record_event("error", "snapshot_refused", name, loaded.snapshot_problem)
        try:
            # The reserved size was an estimate.
            await self.host_budget.reserve(name, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        kept = self._cache.put(name, fd, loaded.layout_digest, loaded.self_check)
        if given is None or loaded.snapshot_problem:
            self._saved.keep(name, kept)

    async def keep_changed(
        self, fd: int, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded
    ) -> None:
        """Keep the snapshot of a model whose options have changed, with another layout or not.

        Raises:
            CacheFull: too few snapshots can be evicted now; ``fd`` is closed.
        """
        if worker.ready is not None:  # the key of the saved snapshot contains the options
            await self._saved.look_up(to_load(spec, self._settings), worker.ready)
        await self.keep(fd, msgspec.structs.replace(loaded, snapshot_problem=""), None)

    def drop(self, model: str) -> None:
        """Drop the snapshot from host memory; a saved snapshot stays."""
        self._cache.drop(model)
        self.host_budget.changed()

    def renew(self, model: str) -> None:
        """Drop a damaged snapshot from host memory and from disk."""
        self._cache.drop(model)
        self._saved.forget(model)

    def forget(self, model: str) -> None:
        """Forget a removed model and its snapshots."""
        self._cache.forget(model)
        self._saved.forget(model)
        self.host_budget.changed()

    async def start_order(self, registry: Registry) -> list[ModelRow]:
        """See :func:`rows_in_start_order`."""
        return await rows_in_start_order(registry, self._history, self._cache)

    async def restore(self, rows: Sequence[ModelRow], worker: Worker) -> None:
        """Restore snapshots from the service manager; to be called before reads from disk."""
        if worker.ready is not None:
            needs_snapshots = worker.device.kind != "sim"
            models = [to_load(row.spec, self._settings) for row in rows if needs_snapshots]
            await self._stored.restore(models, worker.ready, self._cache)

    async def tidy(self, registry: Registry) -> None:
        """Delete files that belong to no registered model."""
        await self._saved.tidy([row.spec.name for row in await registry.list()])

    async def _drop_from_workers(self, model: str) -> None:
        """Make all workers release the model's snapshot; return after the release."""
        await self._saved.settled(model)  # a save in progress would keep the memory
        workers = self._supervisor.workers
        await asyncio.gather(*(self._supervisor.drop_snapshot(one, model) for one in workers))


def _whole_pages(num_bytes: int, worker: Worker) -> int:
    """Return the host memory of a snapshot of ``num_bytes``, in whole pages."""
    page_bytes = worker.ready.page_bytes if worker.ready is not None else 1
    return -(-num_bytes // page_bytes) * page_bytes
