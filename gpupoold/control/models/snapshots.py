"""The weights snapshots of registered models: in host memory, on disk, and on the workers."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence

import msgspec

from gpupool_state import History, ModelRow, Registry
from gpupoold.control.live_requests import LiveRequest
from gpupoold.control.models.descriptions import to_load
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.steps import WeightsState
from gpupoold.control.weights.cache import (
    CachedSnapshot,
    CacheSetting,
    Candidate,
    HostMemoryBudget,
    SnapshotCache,
    SnapshotId,
    start_order,
)
from gpupoold.control.weights.kept_snapshots import SavedSnapshots, StoredSnapshots, kv_identity
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import ModelSpec
from gpupoold.errors import GpupoolError
from gpupoold.scheduling import events as e
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)


class ModelSnapshots(ModelPart):
    """Finds, keeps and drops the snapshots of models; ``host_budget`` evicts snapshots."""

    def __init__(
        self,
        parts: ControlParts,
        cache: SnapshotCache,
        saved: SavedSnapshots,
        stored: StoredSnapshots,
        setting: Callable[[], CacheSetting] = CacheSetting,
    ) -> None:
        """``setting`` returns the origin of the model cache's size, for messages."""
        super().__init__(parts)
        self._devices = parts.fleet.snapshots
        self._live = parts.dispatcher.live
        self._cache = cache
        self._saved = saved
        self._stored = stored
        self.host_budget = HostMemoryBudget(cache, self.is_in_use, self._take_out, setting)

    def is_in_use(self, of: SnapshotId) -> bool:
        """Return whether requests are on devices of the snapshot's degree, or may come there."""
        if len(self._devices.degrees) == 1:
            return self._live.num_of(of.model) > 0
        return any(
            of.degree in self._degrees_of(request) for request in self._live.of_model(of.model)
        )

    def cached(self, model: str, worker: Worker) -> CachedSnapshot | None:
        """Return the model's snapshot for a worker if in host memory."""
        return self._cache.get(self._devices.of(model, worker.number))

    def has_any(self, model: str) -> bool:
        """Return whether a snapshot of the model is in host memory, for whatever devices."""
        return bool(self._cache.of_model(model))

    def is_at_hand(self, model: str, worker: Worker) -> bool:
        """Return whether a load on the worker makes no snapshot."""
        return worker.device.kind == "sim" or self.cached(model, worker) is not None

    def touch(self, model: str, device: int | None = None) -> None:
        """Record a use of the model on a device; the model may have become idle there."""
        degree = None if device is None else self._devices.degree(device)
        self._cache.touch(model, degree=degree)
        if not all(self.is_in_use(snapshot_id) for snapshot_id in self._cache.of_model(model)):
            self.host_budget.changed()

    def weights(self, model: str, degree: int, expected_bytes: int) -> WeightsState:
        """Return the state of a snapshot of about ``expected_bytes``."""
        of = SnapshotId(model, degree)
        if self._cache.get(of) is not None:
            return WeightsState(is_cached=True)
        return WeightsState(space=self.host_budget.space(of, self._size(of, expected_bytes)))

    def why_full(
        self, model: str, degree: int, expected_bytes: int, waited_s: float = 0.0
    ) -> GpupoolError:
        """Return the error for a snapshot without memory, see ``HostMemoryBudget.why_full``."""
        of = SnapshotId(model, degree)
        return self.host_budget.why_full(of, self._size(of, expected_bytes), waited_s)

    def _size(self, of: SnapshotId, expected_bytes: int) -> int:
        known_bytes = self._cache.known_bytes(of)
        if known_bytes is not None:
            return known_bytes
        workers = [worker for worker in self._supervisor.workers if worker.ready is not None]
        return _whole_pages(expected_bytes, workers[0]) if workers else expected_bytes

    async def reserve(self, spec: ModelSpec, worker: Worker, expected_bytes: int) -> None:
        """Reserve host memory for the model's snapshot for a worker, unless present.

        The caller holds the snapshot. Raises CacheFull: see :meth:`HostMemoryBudget.reserve`.
        """
        if worker.ready is None or self.is_at_hand(spec.name, worker):
            return
        num_bytes = await self._look_up(spec, worker) or _whole_pages(expected_bytes, worker)
        of = self._devices.of(spec.name, worker.number)
        await self.host_budget.reserve(of, num_bytes)

    async def for_load(
        self, spec: ModelSpec, worker: Worker, expected_bytes: int
    ) -> CachedSnapshot | None:
        """Return the model's snapshot for a worker, reading the disk if needed.

        If the result is None, the worker must make the snapshot; host memory is then reserved.
        Raises CacheFull: too few snapshots can be evicted now.
        """
        if worker.device.kind == "sim" or worker.ready is None:
            return None
        snapshot = self.cached(spec.name, worker) or await self.read(spec, worker)
        if snapshot is None:
            of = self._devices.of(spec.name, worker.number)
            await self.host_budget.reserve(of, _whole_pages(expected_bytes, worker))
        return snapshot

    async def read(self, spec: ModelSpec, worker: Worker) -> CachedSnapshot | None:
        """Read the model's snapshot for a worker from disk into the cache; return None if there is
        none.

        The caller holds the snapshot. Raises CacheFull: too few snapshots can be evicted now.
        """
        num_bytes = await self._look_up(spec, worker)
        if num_bytes is None:
            return None
        of = self._devices.of(spec.name, worker.number)
        await self.host_budget.reserve(of, num_bytes)
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        assert worker.ready is not None
        saved = await self._saved.read(of, worker.ready.facts.rank_nodes)
        if saved is None:
            return None
        size, took_s = format_bytes(saved.num_bytes), loop.time() - started_s
        _logger.info("%s: snapshot of %s read in %.2f s", of, size, took_s)
        return self._cache.put(of, saved.fd, saved.layout_digest, saved.self_check)

    def check_nodes(self, now_s: float) -> None:
        """Tell the core which models' snapshots are far from a device; for periodic calls."""
        for number, device in self._dispatcher.state.devices.items():
            ready = self._supervisor.workers[number].ready
            if ready is None or device.up.far_share == 1:
                continue
            degree = self._devices.degree(number)
            far = frozenset(
                of.model
                for of, snapshot in self._cache.snapshots.items()
                if of.degree == degree and snapshot.is_far_from(ready.facts.rank_nodes)
            )
            if far != device.far:
                self._dispatcher.shell.handle(e.FarSnapshots(number, tuple(sorted(far))))

    def kv_identity(self, spec: ModelSpec, worker: Worker) -> str:
        """Return the identity of the model's KV on a worker, after :meth:`for_load`."""
        key = self._saved.key(self._devices.of(spec.name, worker.number))
        return kv_identity(to_load(spec, self._settings), key)

    async def keep(
        self, fd: int, worker: Worker, loaded: m.ModelLoaded, given: CachedSnapshot | None
    ) -> None:
        """Keep the snapshot from a worker; ``given`` is the snapshot sent with the load, or None.

        Raises CacheFull: too few snapshots can be evicted now; ``fd`` is closed.
        """
        name = loaded.model.name
        of = self._devices.of(name, worker.number)
        if loaded.snapshot_problem:
            self._history.record_event("error", "snapshot_refused", name, loaded.snapshot_problem)
        try:
            # The reserved size was an estimate.
            await self.host_budget.reserve(of, os.fstat(fd).st_size)
        except BaseException:
            os.close(fd)
            raise
        kept = self._cache.put(of, fd, loaded.layout_digest, loaded.self_check)
        if given is None or loaded.snapshot_problem:
            self._saved.keep(of, kept)

    async def keep_changed(
        self, fd: int, spec: ModelSpec, worker: Worker, loaded: m.ModelLoaded
    ) -> None:
        """Keep the snapshot of a model whose options have changed, with another layout or not.

        Raises CacheFull: too few snapshots can be evicted now; ``fd`` is closed.
        """
        try:
            await self._look_up(spec, worker)  # the key of the saved snapshot has the options
        except BaseException:
            os.close(fd)
            raise
        await self.keep(fd, worker, msgspec.structs.replace(loaded, snapshot_problem=""), None)

    def drop(self, model: str) -> None:
        """Drop the model's snapshots from host memory; saved snapshots stay."""
        self._cache.drop_all(model)
        self.host_budget.changed()

    def drop_outdated(self, model: str) -> None:
        """Drop the snapshots that no device of a changed model has, and that were not made anew."""
        for of in set(self._cache.of_model(model)).difference(self._fleet.needed_snapshots(model)):
            self._cache.drop(of)
        self.host_budget.changed()

    async def renew(self, model: str) -> None:
        """Drop damaged snapshots from host memory and from disk, with KV that may be wrong."""
        self._supervisor.forget_prefixes(model)
        self._cache.drop_all(model)
        await self._saved.forget(model)

    async def forget(self, model: str) -> None:
        """Forget a removed model and its snapshots."""
        self._cache.forget(model)
        await self._saved.forget(model)
        self.host_budget.changed()

    async def start_order(self) -> list[ModelRow]:
        """See :func:`rows_in_start_order`."""

        def num_snapshots(row: ModelRow) -> int:
            numbers = row.spec.devices or range(len(self._supervisor.workers))
            return len(self._devices.all_of(row.spec.name, numbers))

        return await rows_in_start_order(self._registry, self._history, self._cache, num_snapshots)

    async def restore(self, rows: Sequence[ModelRow], worker: Worker) -> None:
        """Restore snapshots from the service manager; to be called before reads from disk."""
        if worker.ready is not None:
            needs_snapshots = worker.device.kind != "sim"
            models = [to_load(row.spec, self._settings) for row in rows if needs_snapshots]
            degree = self._devices.degree(worker.number)
            later = self._devices.degrees - {degree}
            await self._stored.restore(models, worker.ready, self._cache, degree, later)

    async def tidy(self) -> None:
        """Delete files that belong to no registered model, when a worker of each degree is up."""
        workers = {
            self._devices.degree(worker.number): worker
            for worker in self._supervisor.workers
            if worker.is_ready and worker.device.kind != "sim"
        }
        rows = await self._registry.list()
        for row in rows:
            for degree, worker in workers.items():
                if self._saved.key(SnapshotId(row.spec.name, degree)) is None:
                    await self._look_up(row.spec, worker)
        degrees = self._devices.degrees
        await self._saved.tidy(
            SnapshotId(row.spec.name, degree) for row in rows for degree in degrees
        )

    def rest(self, model: str, numbers: Iterable[int], why: str) -> None:
        """Let devices of the model rest, whose snapshot has no place, while others serve."""
        numbers = sorted(set(numbers) - self._devices.resting(model))
        for number in numbers:
            self._dispatcher.rest(model, number)
        if numbers:
            where = f"device{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
            text = f"{where}: no requests for lack of host memory, other devices serve: {why}"
            self._history.record_event("info", "device_rests", model, text)

    def _take_out(self, of: SnapshotId) -> Awaitable[None]:
        """Let the devices of an evicted snapshot rest if others can serve; return the release by
        all workers.
        """
        others = [snapshot for snapshot in self._fleet.needed_snapshots(of.model) if snapshot != of]
        if any(self._cache.get(other) is not None for other in others):
            numbers = self._fleet.devices_with_snapshot(of.model)
            mine = [number for number in numbers if self._devices.of(of.model, number) == of]
            budget = format_bytes(self._cache.budget_bytes)
            self.rest(of.model, mine, f"the model cache of {budget} has no room for all snapshots")
        return self._drop_from_workers(of)

    async def _drop_from_workers(self, of: SnapshotId) -> None:
        """Make all workers release a snapshot; return after the release."""
        await self._saved.settled(of)  # a save in progress would keep the memory
        model = of.model
        workers = [
            worker
            for worker in self._supervisor.workers
            if self._devices.of(model, worker.number) == of
        ]
        await asyncio.gather(*(self._supervisor.drop_snapshot(worker, model) for worker in workers))

    async def _look_up(self, spec: ModelSpec, worker: Worker) -> int | None:
        """Return the bytes of the saved snapshot for a worker, None without one."""
        if worker.ready is None:
            return None
        degree = self._devices.degree(worker.number)
        return await self._saved.look_up(to_load(spec, self._settings), worker.ready, degree)

    def _degrees_of(self, request: LiveRequest) -> set[int]:
        """Return the degrees of the devices that have a request or may get the request."""
        if request.device is None:
            numbers = set(self._fleet.devices_with_snapshot(request.model))
            if not numbers:
                return self._devices.degrees
            numbers -= self._devices.resting(request.model)
        else:
            numbers = {request.device}
        if request.migration is not None:
            numbers |= {request.migration.source, request.migration.target}
        return {self._devices.degree(number) for number in numbers}


def _whole_pages(num_bytes: int, worker: Worker) -> int:
    """Return the host memory of a snapshot of ``num_bytes``, in whole pages."""
    page_bytes = worker.ready.facts.page_bytes if worker.ready is not None else 1
    return -(-num_bytes // page_bytes) * page_bytes


async def rows_in_start_order(
    registry: Registry,
    history: History,
    cache: SnapshotCache,
    num_snapshots: Callable[[ModelRow], int] = lambda _: 1,
) -> list[ModelRow]:
    """Return all models, ordered to fill the cache with pinned, then recently used snapshots.

    Also records pins and earlier uses in the cache. ``num_snapshots`` returns for how many degrees
    a model has snapshots. Raises Failed: the registry cannot be read.
    """
    rows = {str(row.spec.name): row for row in await registry.list()}
    cache.pinned = {name for name, row in rows.items() if row.is_pinned}
    await _recall_use(rows, history, cache)
    candidates = [
        Candidate(
            name,
            num_snapshots(row) * row.weight_bytes,
            cache.last_used_at(name) or 0.0,
            row.is_pinned,
        )
        for name, row in rows.items()
    ]
    return [rows[name] for name in start_order(candidates, cache.budget_bytes)]


async def _recall_use(rows: dict[str, ModelRow], history: History, cache: SnapshotCache) -> None:
    """Set the last use of each model from the history, or else from the registration."""
    unknown = [name for name in rows if cache.last_used_at(name) is None]
    if not unknown:
        return
    try:
        last_requests = await history.last_requests()
    except GpupoolError as error:
        _logger.warning("the last use of each model is unknown: %s", error)
        last_requests = {}
    for name in unknown:
        cache.touch(name, last_requests.get(name, rows[name].created_at))
