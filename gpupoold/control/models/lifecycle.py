"""A model's life: added, changed, removed; reloaded when a process comes back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from typing import Literal

from gpupool_state import EventLevel, History, ModelRow, Registry
from gpupoold.api.schemas import AddModelRequest, Progress, SetModelRequest
from gpupoold.config.schema import Settings
from gpupoold.control.frontends.frontend import Frontend
from gpupoold.control.models.circuit_breaker import CircuitBreakers
from gpupoold.control.models.info import model_info
from gpupoold.control.models.intake import Intake
from gpupoold.control.models.loader import ModelLoader
from gpupoold.control.models.names import check_names_free
from gpupoold.control.models.quarantine import Quarantine
from gpupoold.control.models.retries import Retries
from gpupoold.control.models.shared_lock import SharedLock
from gpupoold.control.models.specs import to_load
from gpupoold.control.models.startup import rows_in_start_order
from gpupoold.control.models.warming import Warmer
from gpupoold.control.processes.crash_attribution import Death
from gpupoold.control.requests.dispatcher import Dispatcher
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.fd_store import StoredSnapshots
from gpupoold.control.weights.host_budget import NoRoom
from gpupoold.control.weights.saved_snapshots import SavedSnapshots
from gpupoold.control.workers.worker import Worker
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import EventKind, ModelSpec, ModelState, Targets
from gpupoold.errors import GpupoolError, NoSuchModel, Refused, TimedOut
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

RemoveMode = Literal["refuse", "drain", "force"]

_DRAIN_POLL_S = 0.05


class ModelLifecycle:
    """Changes to the set of models, one at a time; new workers load models concurrently.

    Serving continues meanwhile.
    """

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        supervisor: WorkerSupervisor,
        cache: SnapshotCache,
        saved: SavedSnapshots,
        stored_snapshots: StoredSnapshots,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
        self._saved = saved
        self._stored_snapshots = stored_snapshots
        self._changing = SharedLock()
        self._leaving: set[str] = set()
        self._tasks: set[asyncio.Task[ModelRow]] = set()
        self._breakers = CircuitBreakers()
        self.loader = ModelLoader(
            settings, registry, history, dispatcher, supervisor, cache, saved, self._breakers
        )
        self.warmer = Warmer(
            settings,
            registry,
            history,
            dispatcher,
            supervisor,
            cache,
            self.loader,
            self._not_loaded,
        )
        self.quarantine = Quarantine(
            self._breakers,
            registry,
            history,
            dispatcher,
            self.loader,
            self.warmer,
            self.publish,
            Retries(dispatcher, supervisor, self._load_later).try_again,
        )

    async def add(self, request: AddModelRequest) -> AsyncIterator[Progress]:
        """Register a model step by step; undo all steps after a failure or when the reader
        leaves.

        Raises:
            GpupoolError: the reason of the failing step.
        """
        await check_names_free(self._registry, (request.name, *request.aliases))
        intake = Intake(request, self._settings, self._supervisor, self.loader.room)
        async for step in intake.steps():
            yield step
        if request.check_only:
            yield Progress(stage="check", model=intake.preview())
            return
        yield Progress(stage="load", total_bytes=intake.weight_bytes)
        # A task of its own: when the reader leaves, what was begun is undone undisturbed.
        task = asyncio.create_task(self._register_and_load(intake.spec, intake.weight_bytes))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            row = await asyncio.shield(task)
        finally:
            task.cancel()
        yield Progress(stage="ready", model=model_info(row))

    async def set(self, name: str, request: SetModelRequest) -> ModelRow:
        """Change targets and aliases of a model while the model serves.

        Raises:
            GpupoolError: see ``Registry.update``.
        """
        async with self._changing.alone():
            old = (await self.find(name)).spec
            targets = Targets(
                request.ttft_s or old.targets.ttft_s, request.tbt_s or old.targets.tbt_s
            )
            row = await self._registry.update(
                old.name,
                targets=targets,
                add_aliases=request.add_aliases,
                remove_aliases=request.remove_aliases,
            )
            for worker in self._dispatcher.routes.get(old.name, []):
                worker.send(m.SetTargets(old.name, targets.ttft_s, targets.tbt_s))
            if old.name in self._dispatcher.targets:
                self._dispatcher.set_targets(old.name, targets)
            if row.spec.aliases != old.aliases and self.loader.is_loaded(old.name):
                await self.loader.serve(row.spec)
            await self.publish()
            self._event("info", "model_changed", old.name, "targets or aliases changed")
            return row

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove a model.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the model has live requests and ``mode`` is "refuse".
            TimedOut: requests were left after the drain timeout.
        """
        row = await self.find(name)
        model = row.spec.name
        async with self._changing.alone():
            row = await self.find(model)
            self._check_may_leave(model, mode)
            self._leaving.add(model)
            await self._registry.set_state(model, ModelState.DRAINING)
            await self.publish()
        try:
            if mode == "drain":
                await self._drain(row)  # may last: other models can be changed meanwhile
            async with self._changing.alone():
                await self._forget(row)
        finally:
            self._leaving.discard(model)
        return row

    async def find(self, name: str) -> ModelRow:
        """The model of this name or alias.

        Raises:
            NoSuchModel: there is none; the registered names are in the hint.
        """
        row = await self._registry.get(name)
        if row is None:
            names = ", ".join(row.spec.name for row in await self._registry.list())
            raise NoSuchModel(f"no model is named {name!r}", f"registered: {names or 'none'}")
        return row

    @contextlib.asynccontextmanager
    async def closed(self, model: str) -> AsyncIterator[None]:
        """Refuse new requests of a model inside the context; other models can change meanwhile.

        Raises:
            Refused: the model is closed already.
        """
        if model in self._leaving:
            raise Refused(f"{model} is being unloaded or removed", "wait until it has been")
        self._leaving.add(model)
        try:
            await self.publish()
            yield
        finally:
            self._leaving.discard(model)
            await self.publish()

    async def wait_idle(self, model: str) -> None:
        """Return when a model has no live requests.

        Raises:
            TimedOut: requests are left after ``limits.drain_timeout``.
        """
        limit_s = self._settings.limits.drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        while num_live := self._dispatcher.live.num_of(model):
            if time.monotonic() > deadline_s:
                raise TimedOut(
                    f"{model}: {num_live} requests still run after {limit_s:g} s",
                    "raise limits.drain_timeout or use --force",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    async def stop(self) -> None:
        """Undo unfinished additions; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.warmer.stop()
        await self.quarantine.stop()
        await self.loader.room.stop()

    async def warm(self, name: str) -> ModelRow:
        """Restore a model's snapshot to host memory, and load the model on workers without an
        engine.

        A model in quarantine is tried too.

        Raises:
            NoSuchModel: the model is not registered.
            GpupoolError: the reason of the failure.
        """
        row = await self.find(name)
        model = row.spec.name
        self._breakers.reset(model)
        if not self.loader.is_open(model):
            with self.loader.room.holding(model):
                await self._wait_for_room(row, self._supervisor.workers[0])
                async with self._changing.alone():
                    row = await self.find(model)
                    if not self.loader.is_open(model):
                        await self.loader.load_everywhere(row.spec, row.weight_bytes)
                        row = await self._open(row.spec)
                        await self.publish()
        await self.warmer.warm(model)
        return row

    async def worker_up(self, worker: Worker) -> None:
        """Load every registered model on a new worker."""
        self._event("info", "worker_ready", str(worker.number), "ready")
        self._dispatcher.worker_up(worker)
        async with self._changing.shared():
            rows = await rows_in_start_order(self._registry, self._history, self._cache)
            await self._take_snapshots_back(rows, worker)
            later = [row for row in rows if not await self._reload(row, worker)]
            await self.publish()
        for row in later:
            await self._reload_later(row, worker)
        await self._saved.tidy([row.spec.name for row in await self._registry.list()])

    async def _take_snapshots_back(self, rows: list[ModelRow], worker: Worker) -> None:
        """Take snapshots back from the service manager before reading from disk."""
        if worker.ready is not None:
            needs_snapshots = worker.device.kind != "sim"
            models = [to_load(row.spec, self._settings) for row in rows if needs_snapshots]
            await self._stored_snapshots.take_back(models, worker.ready, self._cache)

    async def worker_down(self, worker: Worker, death: Death) -> None:
        """Remove an ended worker from all routes."""
        candidates = self.quarantine.crashed(worker.number, death)
        reason = f"the worker of device {worker.number} ended: {death.reason}"
        self._dispatcher.worker_down(worker, reason, candidates)
        if death.is_at_fault and not worker.has_come_up:  # nobody knows whether it ever will
            self._dispatcher.fail_unhosted(f"{reason} when it started")
        await self.publish()

    async def frontend_up(self, frontend: Frontend) -> None:
        """Mount every loaded model on a new frontend."""
        await self.publish()
        for row in await self._registry.list():
            if self.loader.is_loaded(row.spec.name):
                try:
                    await self.loader.serve_on(frontend, row.spec)
                except GpupoolError as error:
                    self._event("error", "model_not_mounted", row.spec.name, str(error))
        await self.publish()

    async def frontend_down(self, frontend: Frontend, death: Death) -> None:
        """Cancel the requests of an ended frontend."""
        self._event(
            "error", "frontend_down", frontend.name, f"ended ({death.reason}), it is restarted"
        )
        self._dispatcher.frontend_down(frontend.number)

    async def publish(self, opening: str | None = None) -> None:
        """Send the models and states to the frontends; the model ``opening`` counts as ready."""
        if self.loader.frontends is None:
            return
        rows = await self._registry.list()
        served = [self._served(row, is_open=row.spec.name == opening) for row in rows]
        self.loader.frontends.send(m.ModelList(served, self._supervisor.any_ready))

    def state_of(self, row: ModelRow) -> ModelState:
        """Return a model's present state: ready requires a worker with the model and a mounted
        API.

        A model that was draining when the daemon ended is loaded again.
        """
        if row.spec.name in self._leaving:
            return ModelState.DRAINING
        is_up = row.state in (ModelState.READY, ModelState.DRAINING)
        if is_up and not self.loader.is_open(row.spec.name):
            return ModelState.LOADING
        return row.state

    def _served(self, row: ModelRow, *, is_open: bool) -> m.ServedModel:
        return m.ServedModel(
            name=row.spec.name,
            aliases=row.spec.aliases,
            state=(ModelState.READY if is_open else self.state_of(row)).value,
            created_at=row.created_at,
            reason="" if is_open else row.error,
            retry_at_s=self._breakers.retry_at_s(row.spec.name) or 0.0,
            max_model_len=row.loaded_max_model_len,
        )

    async def _register_and_load(self, spec: ModelSpec, weight_bytes: int) -> ModelRow:
        async with self._changing.alone():
            await self._registry.add(spec)
            try:
                await self._registry.set_state(spec.name, ModelState.LOADING)
                await self.publish()
                await self.loader.load_everywhere(spec, weight_bytes)
                row = await self._open(spec)
            except BaseException as error:
                await self._undo_add(spec, str(error) or "its client left")
                raise
            self._event("info", "model_added", spec.name, f"serving from {spec.path}")
            return row

    async def _open(self, spec: ModelSpec) -> ModelRow:
        """Open a loaded model for requests.

        The frontends learn of the state first, and the answer to the mount confirms it, so that a
        client that reads ``ready`` can use the model.
        """
        self.quarantine.works(spec.name)
        await self.publish(opening=spec.name)
        await self.loader.serve(spec)
        return await self._registry.set_state(spec.name, ModelState.READY)

    async def _undo_add(self, spec: ModelSpec, reason: str) -> None:
        try:
            await self.loader.unload(spec.name)
        finally:
            await self._registry.remove(spec.name)
            self._breakers.reset(spec.name)
            self._event("error", "model_refused", spec.name, reason)
            await self.publish()

    async def _reload(self, row: ModelRow, worker: Worker) -> bool:
        """Load a model on a new worker; return False if host memory is full now."""
        name = row.spec.name
        if name in self._leaving or not worker.is_ready or self._breakers.is_shut_out(name):
            return True
        try:
            await self._load_and_open(row, worker)
        except NoRoom:
            return False
        except GpupoolError as error:
            await self._not_loaded(name, error)
        return True

    async def _reload_later(self, row: ModelRow, worker: Worker) -> None:
        """Load a model when host memory becomes free; other models' requests may need the
        worker.
        """
        try:
            await self._load_later(row.spec.name, worker)
        except GpupoolError as error:
            await self._not_loaded(row.spec.name, error)

    async def _load_later(self, name: str, worker: Worker) -> None:
        """Load a registered model on a worker when host memory is free."""
        row = await self._registry.get(name)
        if row is None or name in self._leaving:
            return
        with self.loader.room.holding(name):
            await self._wait_for_room(row, worker)
            async with self._changing.shared():
                now = await self._registry.get(name)
                if now is not None and name not in self._leaving:
                    await self._load_and_open(now, worker)

    async def _load_and_open(self, row: ModelRow, worker: Worker) -> None:
        # Mounting takes the frontends a while; once is enough for all workers of a box.
        was_open = self.loader.is_open(row.spec.name)
        await self.loader.load(row.spec, worker, row.weight_bytes)
        if not was_open:
            await self._open(row.spec)
            await self.publish()

    async def _wait_for_room(self, row: ModelRow, worker: Worker) -> None:
        limit_s = self._settings.limits.load_timeout_s
        await self.loader.wait_for_room(row.spec, worker, row.weight_bytes, limit_s)

    async def _not_loaded(self, name: str, error: GpupoolError) -> None:
        """Record that a worker could not load a model; without another worker the model has
        failed.
        """
        if await self._registry.get(name) is None:
            return  # removed meanwhile
        self._event("error", "model_failed", name, str(error))
        if not self._dispatcher.routes.get(name):
            self._dispatcher.fail_model(name, f"{name} could not be loaded: {error}")
            await self.quarantine.failed(name, str(error))
        await self.publish()

    def _check_may_leave(self, model: str, mode: RemoveMode) -> None:
        num_live = self._dispatcher.live.num_of(model)
        if num_live and mode == "refuse":
            raise Refused(
                f"{model} has {num_live} live requests", "use --drain to wait or --force to cancel"
            )

    async def _drain(self, row: ModelRow) -> None:
        try:
            await self.wait_idle(row.spec.name)
        except TimedOut:
            self._leaving.discard(row.spec.name)
            await self._registry.set_state(row.spec.name, ModelState.READY)
            await self.publish()
            raise

    async def _forget(self, row: ModelRow) -> None:
        model = row.spec.name
        now = await self._registry.get(model)
        if now is None or now.created_at != row.created_at:
            return  # somebody else removed it while its requests ended
        self._dispatcher.fail_model(model, f"{model} was removed")
        await self.warmer.cancel(model)
        await self.loader.unload(model)
        await self._registry.remove(model)
        self._breakers.reset(model)
        await self.publish()
        self._event("info", "model_removed", model, "removed")

    def _event(self, level: EventLevel, kind: EventKind, subject: str, message: str) -> None:
        self._history.record_event(level, kind, subject, message)
