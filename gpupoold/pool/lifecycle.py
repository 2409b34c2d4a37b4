"""A model's life: resolved, checked, loaded, served, changed, removed."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal

from gpupool_state import History, ModelRow, Registry, check_names
from gpupoold.admin.models import AddModelRequest, ModelInfo, Progress, SetModelRequest
from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint
from gpupoold.checkpoints.download import checkpoint_dir, download
from gpupoold.checkpoints.fit import estimate_weight_bytes, fits
from gpupoold.checkpoints.resolve import HubSource, resolve
from gpupoold.config import Settings
from gpupoold.domain import ModelSpec, ModelState, Targets
from gpupoold.errors import GpupoolError, NoSuchModel, Refused, TimedOut, Unavailable
from gpupoold.pool.dispatch import Dispatcher
from gpupoold.pool.frontends import FrontendSupervisor
from gpupoold.pool.image_cache import ImageCache
from gpupoold.pool.instances import Instance, InstanceSupervisor
from gpupoold.pool.specs import checked_info, spec_of, to_load
from gpupoold.pool.views import model_info
from gpupoold.units import format_bytes
from gpupoold.wire import messages as m

_logger = logging.getLogger(__name__)

RemoveMode = Literal["refuse", "drain", "force"]

_INSTANCE_WAIT_S = 120.0
_DRAIN_POLL_S = 0.05
# Room for the KV of a short request must be left beside the weights.
_MIN_KV_SHARE = 0.02


class ModelLifecycle:
    """Changes to the set of models; one at a time, serving goes on meanwhile."""

    def __init__(
        self,
        settings: Settings,
        registry: Registry,
        history: History,
        dispatcher: Dispatcher,
        supervisor: InstanceSupervisor,
        cache: ImageCache,
    ) -> None:
        self._settings = settings
        self._registry = registry
        self._history = history
        self._dispatcher = dispatcher
        self._supervisor = supervisor
        self._cache = cache
        self._loaded: dict[str, m.LoadedModel] = {}
        self._changing = asyncio.Lock()
        self._leaving: set[str] = set()
        self._tasks: set[asyncio.Task[ModelRow]] = set()
        self.frontend: FrontendSupervisor | None = None

    async def add(self, request: AddModelRequest) -> AsyncIterator[Progress]:
        """Register a model step by step; nothing is kept when a step fails.

        Raises:
            GpupoolError: what was wrong, at the step where it showed.
        """
        yield Progress(stage="resolve")
        await self._check_names_free(request)
        found = resolve(request.name, request.source, self._settings.paths.model_dirs)
        if isinstance(found, HubSource):
            source = found.repo_id
            progress: asyncio.Queue[Progress] = asyncio.Queue()
            task = asyncio.create_task(self._download(found.repo_id, request.revision, progress))
            async for line in _until_done(task, progress):
                yield line
            path = await task
        else:
            path = found.path
            source = request.source or str(path)
        yield Progress(stage="check")
        info = await self._check(path, request)
        spec = spec_of(request, source, path)
        if request.check_only:
            yield Progress(stage="check", model=checked_info(spec, info, request.dtype))
            return
        yield Progress(stage="load", total_bytes=estimate_weight_bytes(info, request.dtype))
        # A task of its own: when the client leaves, what was begun is undone undisturbed.
        task = asyncio.create_task(self._register_and_load(spec), name=f"add-{spec.name}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            row = await asyncio.shield(task)
        finally:
            task.cancel()
        yield Progress(stage="ready", model=model_info(row))

    async def set(self, name: str, request: SetModelRequest) -> ModelRow:
        """Change targets and aliases of a model while it serves.

        Raises:
            GpupoolError: see ``Registry.update``.
        """
        async with self._changing:
            old = await self.find(name)
            targets = Targets(
                request.ttft_s or old.spec.targets.ttft_s, request.tbt_s or old.spec.targets.tbt_s
            )
            row = await self._registry.update(
                old.spec.name,
                targets=targets,
                add_aliases=request.add_aliases,
                remove_aliases=request.remove_aliases,
            )
            for instance in self._dispatcher.routes.get(old.spec.name, []):
                instance.send(m.SetTargets(old.spec.name, targets.ttft_s, targets.tbt_s))
            self._dispatcher.targets[old.spec.name] = targets
            if row.spec.aliases != old.spec.aliases and old.spec.name in self._loaded:
                await self._serve(row.spec)
            await self.publish()
            self._event("info", "model_changed", row.spec.name, "targets or aliases changed")
            return row

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Forget a model.

        Raises:
            NoSuchModel: it is not registered.
            Refused: it has live requests and ``mode`` is "refuse".
            TimedOut: they did not end within the drain timeout.
        """
        row = await self.find(name)
        model = row.spec.name
        async with self._changing:
            row = await self.find(model)
            self._check_may_leave(model, mode)
            self._leaving.add(model)
            await self._registry.set_state(model, ModelState.DRAINING)
            await self.publish()
        try:
            if mode == "drain":
                await self._drain(row)  # may last: other models can be changed meanwhile
            async with self._changing:
                await self._forget(row)
        finally:
            self._leaving.discard(model)
        return row

    async def find(self, name: str) -> ModelRow:
        """The model of this name or alias.

        Raises:
            NoSuchModel: there is none; near names are in the hint.
        """
        row = await self._registry.get(name)
        if row is None:
            names = ", ".join(row.spec.name for row in await self._registry.list())
            raise NoSuchModel(f"no model is named {name!r}", f"registered: {names or 'none'}")
        return row

    async def instance_up(self, instance: Instance) -> None:
        """Load every registered model on an instance that has just come up."""
        self._event("info", "instance_ready", str(instance.number), "ready")
        async with self._changing:
            for row in await self._registry.list():
                if row.spec.name not in self._leaving and instance.is_ready:
                    await self._reload(row, instance)
            await self.publish()

    async def instance_down(self, instance: Instance) -> None:
        """Take an instance out of all routes."""
        number = instance.number
        self._event("error", "instance_down", str(number), "ended; it will be restarted")
        self._dispatcher.instance_down(instance, f"the worker of device {number} ended")
        await self.publish()

    async def frontend_up(self) -> None:
        """Mount every loaded model on a new frontend."""
        await self.publish()
        for row in await self._registry.list():
            try:
                if row.spec.name in self._loaded:
                    await self._serve(row.spec)
            except GpupoolError as error:
                self._event("error", "model_failed", row.spec.name, str(error))
        await self.publish()

    async def publish(self) -> None:
        """Tell the frontend which models there are and in which state."""
        if self.frontend is None:
            return
        rows = await self._registry.list()
        ready = any(instance.is_ready for instance in self._supervisor.instances)
        self.frontend.send(m.ModelList([self._served(row) for row in rows], ready))

    def state_of(self, row: ModelRow) -> ModelState:
        """A model's state now: ready needs an instance that has it.

        One that was draining when the daemon ended is loaded again like the others.
        """
        if row.spec.name in self._leaving:
            return ModelState.DRAINING
        is_up = row.state in (ModelState.READY, ModelState.DRAINING)
        if is_up and not self._dispatcher.routes.get(row.spec.name):
            return ModelState.LOADING
        return row.state

    def _served(self, row: ModelRow) -> m.ServedModel:
        return m.ServedModel(
            name=row.spec.name,
            aliases=row.spec.aliases,
            state=self.state_of(row).value,
            created_at=row.created_at,
            reason=row.error,
            max_model_len=row.loaded_max_model_len,
        )

    async def _check_names_free(self, request: AddModelRequest) -> None:
        check_names((request.name, *request.aliases))
        for name in (request.name, *request.aliases):
            row = await self._registry.get(name)
            if row is not None:
                what = "registered" if row.spec.name == name else f"an alias of {row.spec.name}"
                raise Refused(f"{name!r} is already {what}", "choose another name or remove it")

    async def _download(
        self, repo_id: str, revision: str | None, progress: asyncio.Queue[Progress]
    ) -> Path:
        def report(done_bytes: int, total_bytes: int) -> None:
            line = Progress(stage="download", done_bytes=done_bytes, total_bytes=total_bytes)
            progress.put_nowait(line)

        return await download(
            repo_id,
            revision,
            checkpoint_dir(self._settings.paths.download_dir, repo_id, revision),
            report,
            allow_pickle=self._settings.security.allow_pickle,
            allow_remote_code=self._settings.security.allow_remote_code,
            model_dirs=self._settings.paths.model_dirs,
        )

    async def _check(self, path: Path, request: AddModelRequest) -> CheckpointInfo:
        security = self._settings.security
        info = await asyncio.to_thread(
            check_checkpoint,
            path,
            allow_pickle=security.allow_pickle,
            allow_remote_code=security.allow_remote_code,
        )
        weight_bytes = estimate_weight_bytes(info, request.dtype)
        sizes = [await self._device_bytes(i) for i in self._supervisor.instances]
        fits(info, request.dtype, max(sizes), kv_bytes=int(weight_bytes * _MIN_KV_SHARE))
        self._cache.check_room(request.name, weight_bytes)
        return info

    async def _device_bytes(self, instance: Instance) -> int:
        await _wait_ready(instance)
        assert instance.ready is not None
        return instance.ready.device_bytes

    async def _register_and_load(self, spec: ModelSpec) -> ModelRow:
        async with self._changing:
            await self._registry.add(spec)
            try:
                await self._registry.set_state(spec.name, ModelState.LOADING)
                await self.publish()
                for instance in self._supervisor.instances:
                    await self._load(spec, instance)
                await self._serve(spec)
                row = await self._registry.set_state(spec.name, ModelState.READY)
            except BaseException as error:
                await self._undo_add(spec, str(error) or "its client left")
                raise
            self._event("info", "model_added", spec.name, f"serving from {spec.path}")
            await self.publish()
            return row

    async def _undo_add(self, spec: ModelSpec, reason: str) -> None:
        try:
            await self._stop_serving(spec.name)
        finally:
            await self._registry.remove(spec.name)
            self._event("error", "model_refused", spec.name, reason)
            await self.publish()

    async def _load(self, spec: ModelSpec, instance: Instance) -> None:
        await _wait_ready(instance)
        image = self._cache.get(spec.name)
        started_s = time.monotonic()
        loaded, fd = await self._supervisor.load(
            instance,
            to_load(spec, self._settings),
            image.fd if image else None,
            image.digest if image else "",
        )
        try:
            self._cache.check_room(spec.name, os.fstat(fd).st_size)
        except Refused:
            os.close(fd)
            await self._supervisor.unload(instance, spec.name)
            raise
        self._cache.put(spec.name, fd, loaded.layout_digest)
        info = loaded.model
        self._loaded[spec.name] = info
        await self._registry.set_loaded(
            spec.name,
            architecture=info.architecture,
            weight_bytes=info.weight_bytes,
            kv_bytes_per_token=info.kv_bytes_per_token,
            max_model_len=info.max_model_len,
        )
        self._dispatcher.targets[spec.name] = spec.targets
        self._dispatcher.routes.setdefault(spec.name, []).append(instance)
        _logger.info(
            "%s loaded on instance %d in %.2f s: %s of weights",
            spec.name,
            instance.number,
            time.monotonic() - started_s,
            format_bytes(info.weight_bytes),
        )

    async def _reload(self, row: ModelRow, instance: Instance) -> None:
        name = row.spec.name
        try:
            await self._load(row.spec, instance)
            await self._serve(row.spec)
            await self._registry.set_state(name, ModelState.READY)
        except GpupoolError as error:
            _logger.error("%s could not be loaded: %s", name, error)
            self._event("error", "model_failed", name, str(error))
            if not self._dispatcher.routes.get(name):
                await self._registry.set_state(name, ModelState.FAILED, str(error))
        await self.publish()

    async def _serve(self, spec: ModelSpec) -> None:
        if self.frontend is not None:
            await self.frontend.serve(to_load(spec, self._settings), self._loaded[spec.name])

    def _check_may_leave(self, model: str, mode: RemoveMode) -> None:
        num_live = self._dispatcher.live.num_of(model)
        if num_live and mode == "refuse":
            raise Refused(
                f"{model} has {num_live} live requests", "use --drain to wait or --force to cancel"
            )

    async def _drain(self, row: ModelRow) -> None:
        limit_s = self._settings.limits.drain_timeout_s
        deadline_s = time.monotonic() + limit_s
        while num_live := self._dispatcher.live.num_of(row.spec.name):
            if time.monotonic() > deadline_s:
                self._leaving.discard(row.spec.name)
                await self._registry.set_state(row.spec.name, row.state)
                await self.publish()
                raise TimedOut(
                    f"{row.spec.name}: {num_live} requests still run after {limit_s:g} s",
                    "raise limits.drain_timeout or use --force",
                )
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _forget(self, row: ModelRow) -> None:
        model = row.spec.name
        now = await self._registry.get(model)
        if now is None or now.created_at != row.created_at:
            return  # somebody else removed it while its requests ended
        self._dispatcher.fail_model(model, f"{model} was removed")
        await self._stop_serving(model)
        await self._registry.remove(model)
        await self.publish()
        self._event("info", "model_removed", model, "removed")

    async def _stop_serving(self, name: str) -> None:
        self._dispatcher.routes.pop(name, None)
        self._dispatcher.targets.pop(name, None)
        self._loaded.pop(name, None)
        if self.frontend is not None:
            self.frontend.send(m.StopServing(name))
        for instance in self._supervisor.instances:
            await self._supervisor.unload(instance, name)
        self._cache.drop(name)

    def _event(
        self, level: Literal["info", "warning", "error"], kind: str, subject: str, message: str
    ) -> None:
        self._history.record_event(level, kind, subject, message)


async def _until_done(
    task: asyncio.Task[Path], progress: asyncio.Queue[Progress]
) -> AsyncIterator[Progress]:
    """Lines of ``progress`` until the task ends; the task is cancelled with its reader."""
    try:
        while not task.done() or not progress.empty():
            waiter = asyncio.ensure_future(progress.get())
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if waiter.done():
                yield waiter.result()
            else:
                waiter.cancel()
    finally:
        if not task.done():
            task.cancel()


async def _wait_ready(instance: Instance) -> None:
    deadline_s = time.monotonic() + _INSTANCE_WAIT_S
    while not instance.is_ready:
        if time.monotonic() > deadline_s:
            raise Unavailable(f"instance {instance.number} is {instance.state}", "see gpupool logs")
        await asyncio.sleep(_DRAIN_POLL_S)
