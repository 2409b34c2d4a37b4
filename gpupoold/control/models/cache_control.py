"""Operations of the admin API on the memory of models: show, pin, drop, warm, unload."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence

from gpupool_state import ModelRow
from gpupoold.api.schemas import (
    BoundEngine,
    CachedModel,
    CacheInfo,
    SnapshotPlace,
    Unloaded,
    UnpinnedMemory,
)
from gpupoold.control.models.lifecycle import ModelLifecycle
from gpupoold.control.models.parts import ControlParts, ModelPart, check_own_model
from gpupoold.control.weights.cache import HostMemoryBudget, SnapshotCache, SnapshotId
from gpupoold.control.weights.kept_snapshots import SavedSnapshots
from gpupoold.control.workers.worker import Worker, unbound_bytes
from gpupoold.domain import RemoveMode
from gpupoold.errors import Refused
from gpupoold.units import format_bytes


class CacheControl(ModelPart):
    """A user's operations on the snapshots and the device memory of registered models."""

    def __init__(
        self,
        parts: ControlParts,
        lifecycle: ModelLifecycle,
        cache: SnapshotCache,
        host_budget: HostMemoryBudget,
        saved: SavedSnapshots,
    ) -> None:
        super().__init__(parts)
        self._lifecycle = lifecycle
        self._live = parts.dispatcher.live
        self._cache = cache
        self._host_budget = host_budget
        self._saved = saved

    async def info(self) -> CacheInfo:
        """Return all models' snapshots by name, and the use of the budgets."""
        saved_bytes, rows = await self._saved.sizes(), await self._registry.list()
        return CacheInfo(
            host_bytes=self._cache.used_bytes,
            host_limit_bytes=self._cache.budget_bytes,
            disk_bytes=await self._saved.used_bytes(),
            disk_limit_bytes=self._saved.budget_bytes,
            models=[self._view(row, saved_bytes) for row in rows],
            engines=self._engines([row.spec.name for row in rows]),
            unpinned=[
                UnpinnedMemory(
                    device=worker.number,
                    num_bytes=status.unpinned_bytes,
                    problem=status.pinning_problem,
                )
                for worker in self._supervisor.workers
                if (status := worker.status) is not None and status.unpinned_bytes
            ],
        )

    def _engines(self, models: Sequence[str]) -> list[BoundEngine]:
        """Return all engines by device and model, with the models that can take each over."""
        engines_of = self._fleet.hosts.engines()
        siblings = defaultdict[tuple[int, str], list[str]](list)
        for model in models:
            for number, others in self._fleet.snapshots.slots(model, engines_of).items():
                for other in others:
                    siblings[number, other].append(model)
        engines = [
            BoundEngine(
                device=number,
                model=model,
                num_bytes=host.memory.device_bytes,
                siblings=siblings[number, model],
                why_unshared=host.why_unshared,
            )
            for model, hosts in engines_of.items()
            for number, host in hosts.items()
        ]
        return sorted(engines, key=lambda engine: (engine.device, engine.model))

    async def set_pinned(self, name: str, is_pinned: bool) -> CachedModel:
        """Pin or unpin a model's snapshot in host memory, also for later daemons.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the pinned snapshots would exceed the cache.
        """
        row = await self.find(name)
        model = row.spec.name
        saved_bytes = await self._saved.sizes()
        if is_pinned:
            await self._check_pin(row, saved_bytes)
        row = await self._registry.set_pinned(model, is_pinned)
        if is_pinned:
            self._cache.pinned.add(model)
        else:
            self._cache.pinned.discard(model)
            self._host_budget.changed()
        return self._view(row, saved_bytes)

    async def drop(self, name: str) -> CachedModel:
        """Drop a model's snapshot from host memory; a saved snapshot stays on disk.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the snapshot is pinned, in use or loading.
        """
        row = await self.find(name)
        await self._host_budget.drop(row.spec.name)
        return self._view(row, await self._saved.sizes())

    async def warm(self, name: str) -> CachedModel:
        """Return when a model's snapshot is in host memory and attached to its workers.

        Raises:
            NoSuchModel: the model is not registered.
            GpupoolError: the reason why the snapshot cannot be loaded.
        """
        row = await self._lifecycle.warm(name)
        return self._view(row, await self._saved.sizes())

    async def unload(self, name: str, mode: RemoveMode, *, keep_host: bool = False) -> Unloaded:
        """Free a model's weights and KV on all devices, and its snapshot unless ``keep_host``.

        The engines stay. ``mode`` decides about live requests: ``refuse`` changes nothing if there
        are any, ``drain`` takes no new requests and waits, ``force`` ends the requests.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the name is a preset's or adapter's; the model has live requests and ``mode``
                is "refuse", its snapshot is pinned, or another unload or a removal is under way.
            TimedOut: requests were left after the drain timeout.
            Failed: a worker does not answer.
        """
        spec = (await self.find(name)).spec
        model = spec.name
        check_own_model(spec, name, "memory")
        if model in self._cache.pinned and not keep_host:
            raise Refused(
                f"{model} is pinned",
                f"run `gpupool cache unpin {model}` first, or keep the snapshot with --keep-host",
            )
        if mode == "refuse":
            self._check_idle(model)
        if self._fleet.is_draining(model):
            raise Refused(
                f"{model} is being unloaded or removed",
                "wait until the unload or removal has ended",
            )
        with self._fleet.draining(model):
            if mode == "force":
                self._dispatcher.fail_model(model, f"{model} is being unloaded")
            await self._wait_idle(model)
            freed = await self._free(model, keep_host=keep_host)
        text = f"{format_bytes(freed.device_bytes)} on devices, "
        text += f"{format_bytes(freed.host_bytes)} of host memory freed, by hand"
        self._history.record_event("info", "model_unloaded", model, text)
        return freed

    async def _free(self, model: str, *, keep_host: bool) -> Unloaded:
        workers = self._supervisor.workers
        unbound = unbound_bytes(model, workers)
        numbers = {*self._fleet.availability(model).devices, *unbound}
        ready = [workers[number] for number in sorted(numbers) if workers[number].is_ready]
        device_bytes = sum(_held_bytes(worker, model) for worker in ready) + sum(unbound.values())
        calls = (self._supervisor.call(worker, "page_out", model=model) for worker in ready)
        await asyncio.gather(*calls)
        host_bytes = 0 if keep_host else self._cache.num_bytes(model)
        if host_bytes:
            await self._host_budget.drop(model)
        return Unloaded(name=model, device_bytes=device_bytes, host_bytes=host_bytes)

    def set_host_budget(self, num_bytes: int) -> None:
        """Set the budget of host memory; snapshots beyond the budget are evicted when possible."""
        self._cache.budget_bytes = num_bytes
        self._host_budget.changed()
        self._host_budget.shrink()

    def set_disk_budget(self, num_bytes: int) -> None:
        """Set the budget of disk space; snapshots beyond the budget are deleted."""
        self._saved.budget_bytes = num_bytes
        self._saved.shrink(self._cache.last_use_of)

    async def check_budget(self, num_bytes: int) -> None:
        """Check that all pinned snapshots fit into a model cache of ``num_bytes``.

        Raises Refused: the pinned snapshots do not fit.
        """
        pinned = await self._pinned(await self._saved.sizes())
        pinned_bytes = sum(pinned.values())
        if pinned_bytes > num_bytes:
            raise Refused(
                f"memory.model_cache: {format_bytes(num_bytes)} is too small for the pinned "
                f"snapshots of {', '.join(pinned)}, {format_bytes(pinned_bytes)}",
                "unpin a model (`gpupool cache unpin`) or choose a larger cache",
            )

    async def _check_pin(self, row: ModelRow, saved_bytes: dict[SnapshotId, int]) -> None:
        pinned = await self._pinned(saved_bytes)
        pinned[row.spec.name] = self._view(row, saved_bytes).num_bytes
        if sum(pinned.values()) > self._cache.budget_bytes:
            raise Refused(
                f"{row.spec.name} cannot be pinned: pinned snapshots would take "
                f"{format_bytes(sum(pinned.values()))} of a model cache of "
                f"{format_bytes(self._cache.budget_bytes)}",
                "unpin another model or raise memory.model_cache",
            )

    async def _pinned(self, saved_bytes: dict[SnapshotId, int]) -> dict[str, int]:
        views = [self._view(row, saved_bytes) for row in await self._registry.list()]
        return {view.name: view.num_bytes for view in views if view.is_pinned}

    def _view(self, row: ModelRow, saved_bytes: dict[SnapshotId, int]) -> CachedModel:
        name = row.spec.name
        places = [self._place(of, row, saved_bytes) for of in self._snapshots(name, saved_bytes)]
        states = {place.state for place in places}
        return CachedModel(
            name=name,
            state="host" if "host" in states else "disk" if "disk" in states else "none",
            num_bytes=sum(place.num_bytes for place in places),
            is_saved=all(place.is_saved for place in places),
            is_pinned=row.is_pinned,
            num_live=self._live.num_of(name),
            last_used_at=self._cache.last_used_at(name),
            snapshots=places,
            unbound_bytes=unbound_bytes(name, self._supervisor.workers),
        )

    def _snapshots(self, model: str, saved_bytes: dict[SnapshotId, int]) -> list[SnapshotId]:
        """Return the snapshots that the model's devices need, and others in host memory.

        A model on no device has the saved snapshots, or one for a single GPU.
        """
        present = {*self._fleet.needed_snapshots(model), *self._cache.of_model(model)}
        saved = (of for of in saved_bytes if of.model == model)
        return sorted(present) or sorted(saved) or [SnapshotId(model)]

    def _place(
        self, of: SnapshotId, row: ModelRow, saved_bytes: dict[SnapshotId, int]
    ) -> SnapshotPlace:
        snapshot, saved = self._cache.get(of), saved_bytes.get(of)
        expected_bytes = saved or self._cache.known_bytes(of) or row.weight_bytes
        return SnapshotPlace(
            num_gpus=of.degree,
            state="host" if snapshot is not None else "none" if saved is None else "disk",
            num_bytes=expected_bytes if snapshot is None else snapshot.num_bytes,
            is_saved=saved is not None,
            nodes=[] if snapshot is None else list(snapshot.nodes),
        )


def _held_bytes(worker: Worker, model: str) -> int:
    held = [each for each in worker.status.models if each.model == model] if worker.status else []
    return sum(memory.weights_resident_bytes + memory.kv_resident_bytes for memory in held)
