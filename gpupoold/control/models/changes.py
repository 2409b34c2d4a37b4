"""Changes and removals of registered models."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import SetModelRequest
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.drains import Drains
from gpupoold.control.models.engine_room import EngineRoom
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import find_model
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.domain import ModelSpec, RemoveMode, Targets
from gpupoold.engine_options.adapter_support import check_num_adapters, options_for
from gpupoold.engine_options.names import check_options, engine_part
from gpupoold.errors import GpupoolError, NoSuchModel, Refused

_logger = logging.getLogger(__name__)


def merged_options(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options after ``changes``, in which None removes an option.

    Raises:
        UsageError: see :func:`check_options`.
    """
    names = check_options({name: value or "" for name, value in changes.items()})
    merged = {**present, **dict(zip(names, changes.values(), strict=True))}
    return check_options({name: value for name, value in merged.items() if value is not None})


class Changes(ModelPart):
    """Changes targets, aliases, options and devices of models, and removes models."""

    def __init__(
        self,
        parts: ControlParts,
        drains: Drains,
        controller: ModelController,
        room: EngineRoom,
        mounts: ModelMounts,
        snapshots: ModelSnapshots,
        inspector: Inspector,
    ) -> None:
        super().__init__(parts)
        self._drains = drains
        self._controller = controller
        self._room = room
        self._mounts = mounts
        self._snapshots = snapshots
        self._inspector = inspector

    async def set(self, name: str, request: SetModelRequest) -> ModelRow:
        """Change targets, aliases and options of a model while the model serves.

        Raises:
            GpupoolError: see ``Registry.update``, or why the options are not changed.
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
        """Change the options of the model's engines and API; after a failure the earlier hold.

        Raises:
            Refused: a device of the model cannot divide the model with these options.
            GpupoolError: the reason of a worker or of the frontends.
        """
        _check_takes_adapters(old, engine)
        new, divisions = replace(old, engine=engine), self._room.divisions
        known = divisions.said(old)
        await divisions.check(new)
        lacking = divisions.lacking(new).intersection(self._fleet.availability(old.name).devices)
        if lacking:
            raise divisions.refusal(new, sorted(lacking))
        has_same_engine = await self._have_same_engine(old, new)
        try:
            await self._apply(old, new, has_same_engine=has_same_engine)
        except BaseException:
            try:
                await self._apply(new, old, has_same_engine=has_same_engine)
            except GpupoolError as error:
                _logger.error("%s has the earlier options again: %s", old.name, error)
            await divisions.keep(old, known)
            raise
        await divisions.keep(new)
        self._snapshots.drop_outdated(old.name)
        return new

    async def _apply(self, old: ModelSpec, new: ModelSpec, *, has_same_engine: bool) -> None:
        name = new.name
        self._fleet.changed((await self._registry.set_engine(name, new.engine)).spec)
        for number in self._fleet.availability(name).devices if has_same_engine else ():
            host = self._fleet.hosts.of(name, number)
            host.options = new.engine if host.options == old.engine else host.options
        await self._controller.replace(name)
        if self._fleet.loaded(name) is not None:
            await self._mounts.mount(new)

    async def _have_same_engine(self, old: ModelSpec, new: ModelSpec) -> bool:
        """Return whether the options that differ concern only the API.

        Engines have the parser of reasoning too, which may be found in another chat template.
        """
        if engine_part(old.engine) != engine_part(new.engine):
            return False
        before, after = [await self._inspector.parsers(spec) for spec in (old, new)]
        return before.reasoning.name == after.reasoning.name

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
