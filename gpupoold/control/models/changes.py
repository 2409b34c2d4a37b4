"""Changes and removals of registered models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.drains import Drains
from gpupoold.control.models.engine_changes import EngineChanges, merged_options
from gpupoold.control.models.engine_room import EngineRoom
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import find_model
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.domain import ModelSpec, RemoveMode, Targets
from gpupoold.engine_options.adapter_support import check_num_adapters, options_for
from gpupoold.errors import GpupoolError, NoSuchModel, Refused


class Changes(ModelPart):
    """Changes targets, aliases, options and devices of models, and removes models."""

    def __init__(
        self,
        parts: ControlParts,
        drains: Drains,
        controller: ModelController,
        room: EngineRoom,
        mounts: ModelMounts,
        engines: EngineChanges,
    ) -> None:
        super().__init__(parts)
        self._drains = drains
        self._controller = controller
        self._room = room
        self._mounts = mounts
        self._engines = engines

    async def set(self, name: str, request: SetModelRequest) -> ModelRow:
        """Change targets, aliases and options of a model while the model serves.

        Raises:
            GpupoolError: see ``Registry.update`` and ``EngineChanges.change``.
        """
        model = (await find_model(self._registry, name)).spec.name
        async with self._fleet.alone(model):
            old = (await find_model(self._registry, model)).spec
            engine = merged_options(old.engine, request.engine)
            if engine != old.engine:
                old = await self._set_engine(old, engine)
            targets = Targets(
                request.ttft_s or old.targets.ttft_s, request.tbt_s or old.targets.tbt_s
            )
            row = await self._registry.update(
                old.name,
                targets=targets,
                add_aliases=request.add_aliases,
                remove_aliases=request.remove_aliases,
                pace=request.pace,
            )
            self._dispatcher.changed(row.spec)
            if row.spec.aliases != old.aliases and self._fleet.loaded(old.name) is not None:
                await self._mounts.mount(row.spec)
            await self._mounts.publish()
            text = "options changed" if request.engine else "targets, pace or aliases changed"
            self._history.record_event("info", "model_changed", old.name, text)
            return row

    async def _set_engine(self, old: ModelSpec, engine: dict[str, str]) -> ModelSpec:
        """Change the options, and remount the API; undo both if the API cannot be mounted."""
        _check_takes_adapters(old, engine)
        await self._engines.change(old, engine)
        new = replace(old, engine=engine)
        if self._fleet.loaded(old.name) is not None:
            try:
                await self._mounts.mount(new)
            except GpupoolError:
                await self._engines.change(new, old.engine)
                await self._mounts.mount(old)
                raise
        return new

    async def place(self, name: str, devices: Sequence[int]) -> ModelRow:
        """Choose the devices of a model by hand, or give the choice back with no devices.

        Requests on other devices continue on the chosen devices.

        Raises:
            NoSuchModel: the model is not registered.
            UsageError: there is no such device.
            Refused: a chosen device cannot divide the model; nothing has changed.
            GpupoolError: no chosen device could load the model, or a device could not; the choice
                holds, and the load is retried.
        """
        self._supervisor.check_devices(devices)
        model = (await find_model(self._registry, name)).spec.name
        async with self._fleet.alone(model):
            now = await find_model(self._registry, model)
            chosen = sorted(set(devices))
            self._room.divisions.require_one(replace(now.spec, devices=tuple(chosen)))
            row = await self._registry.set_devices(model, chosen)
            self._fleet.changed(row.spec)
        where = ", ".join(map(str, row.spec.devices))
        text = f"on devices {where}, by hand" if devices else "as the scheduler chooses"
        self._history.record_event("info", "model_placed", model, text)
        if devices:
            self._fleet.check_quarantine(model)
            errors = await self._controller.settle(model)
            hosts, workers = self._fleet.availability(model).devices, self._supervisor.workers
            lacking = [one for one in chosen if workers[one].is_ready and one not in hosts]
            if lacking:
                raise errors[0] if errors else self._controller.why_unloaded(row, lacking[0])
        return await find_model(self._registry, model)

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove a model.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the model has live requests or adapters and ``mode`` is "refuse".
            TimedOut: requests were left after the drain timeout.
        """
        row = await find_model(self._registry, name)
        model = row.spec.name
        if not self._fleet.knows(model):
            raise NoSuchModel(f"no model is named {name!r}", f"{model} is being added")
        try:
            if mode == "refuse":
                _check_without_adapters(row.spec)
                self._drains.check_idle(model)
            with self._fleet.draining(model):
                if mode == "drain":
                    await self._drains.wait_idle(model)
                if not self._controller.is_added(model):
                    self._controller.abandon(model, "was removed")
                async with self._fleet.alone(model):
                    now = await self._registry.get(model)
                    if now is None or now.created_at != row.created_at:
                        return row  # another removal was faster
                    self._dispatcher.fail_model(model, f"{model} was removed")
                    await self._controller.remove(model, "was removed")
            self._history.record_event("info", "model_removed", model, "removed")
        finally:
            await self._mounts.publish()
        return row


def _check_without_adapters(spec: ModelSpec) -> None:
    if spec.adapters:
        names = ", ".join(adapter.name for adapter in spec.adapters)
        raise Refused(
            f"{spec.name} has the adapters {names}",
            "remove these before, or use --drain or --force to remove all together",
        )


def _check_takes_adapters(spec: ModelSpec, engine: dict[str, str]) -> None:
    check_num_adapters(spec.name, engine, len(spec.adapters))
    for adapter in spec.adapters:
        if options_for(engine, adapter.rank):
            raise Refused(
                f"{adapter.name}, an adapter of {spec.name}, has the rank {adapter.rank}, which "
                "the engine would not take",
                f"set max-lora-rank to {adapter.rank} or more, or remove the adapter",
            )
