"""Unloading of a model by a user; the model stays registered, and a request restores it."""

from __future__ import annotations

import asyncio

from gpupoold.api.schemas_top import Unloaded
from gpupoold.control.models.drains import Drains
from gpupoold.control.models.names import check_own_model, find_model
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.weights.host_budget import HostMemoryBudget
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import RemoveMode
from gpupoold.errors import Refused
from gpupoold.units import format_bytes


class ModelUnloader(ModelPart):
    """Frees a model's memory on devices and on the host."""

    def __init__(
        self,
        parts: ControlParts,
        cache: SnapshotCache,
        host_budget: HostMemoryBudget,
        drains: Drains,
    ) -> None:
        super().__init__(parts)
        self._host_budget = host_budget
        self._drains = drains
        self._cache = cache

    async def unload(self, name: str, mode: RemoveMode, *, keep_host: bool = False) -> Unloaded:
        """Free a model's weights and KV on all devices, and its snapshot unless ``keep_host``.

        The engines stay. ``mode`` decides about live requests: ``refuse`` changes nothing if there
        are any, ``drain`` takes no new requests and waits, ``force`` ends the requests.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the name is a preset's or adapter's; the model has live requests and ``mode``
                is "refuse", or its snapshot is pinned.
            TimedOut: requests were left after the drain timeout.
            Failed: a worker does not answer.
        """
        spec = (await find_model(self._registry, name)).spec
        model = spec.name
        check_own_model(spec, name, "memory")
        if model in self._cache.pinned and not keep_host:
            raise Refused(
                f"{model} is pinned",
                f"run `gpupool cache unpin {model}` first, or keep the snapshot with --keep-host",
            )
        if mode == "refuse":
            self._drains.check_idle(model)
        with self._drains.closed(model):
            if mode == "force":
                self._dispatcher.fail_model(model, f"{model} is being unloaded")
            await self._drains.wait_idle(model)
            freed = await self._free(model, keep_host=keep_host)
        text = f"{format_bytes(freed.device_bytes)} on devices, "
        text += f"{format_bytes(freed.host_bytes)} of host memory freed, by hand"
        self._history.record_event("info", "model_unloaded", model, text)
        return freed

    async def _free(self, model: str, *, keep_host: bool) -> Unloaded:
        workers = self._supervisor.workers
        hosts = [workers[number] for number in self._fleet.availability(model).devices]
        ready = [worker for worker in hosts if worker.is_ready]
        device_bytes = sum(_held_bytes(worker, model) for worker in ready)
        calls = (self._supervisor.call(one, "page_out", model=model) for one in ready)
        await asyncio.gather(*calls)
        host_bytes = 0 if keep_host else self._cache.num_bytes(model)
        if host_bytes:
            await self._host_budget.drop(model)
        return Unloaded(name=model, device_bytes=device_bytes, host_bytes=host_bytes)


def _held_bytes(worker: Worker, model: str) -> int:
    models = worker.status.models if worker.status else []
    held = [one for one in models if one.model == model]
    return sum(one.weights_resident_bytes + one.kv_resident_bytes for one in held)
