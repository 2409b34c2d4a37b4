"""The parts that manage models, behind one object."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    Progress,
    SetModelRequest,
)
from gpupoold.control.frontends import Frontend, Frontends
from gpupoold.control.live_requests import RequestListener
from gpupoold.control.models.additions import Additions, OngoingAdditions
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.devices import EngineRoom
from gpupoold.control.models.further_names import ModelAdapters, Presets
from gpupoold.control.models.inspection import Divisions, Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.parking import Parking
from gpupoold.control.models.parts import ControlParts, ModelPart, check_own_model, uncut
from gpupoold.control.models.perform import Failures, Performer
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.processes.supervised import Death
from gpupoold.control.weights.cache import SnapshotCache, Space
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Adapter, ModelSpec, Preset, RemoveMode, Targets
from gpupoold.engine_options.names import (
    check_num_adapters,
    check_options,
    engine_part,
    options_for,
)
from gpupoold.errors import GpupoolError, NoSuchModel, Refused
from gpupoold.wire.messages import GrammarRefused, WrongAnswer

_logger = logging.getLogger(__name__)

LOAD_GRACE_S = 20.0
"""Time for the load of a removed model to stop; a worker has no other means to end it."""


def merged_options(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options after ``changes``, in which None removes an option.

    Raises UsageError: see :func:`check_options`.
    """
    names = check_options({name: value or "" for name, value in changes.items()})
    merged = {**present, **dict(zip(names, changes.values(), strict=True))}
    return check_options({name: value for name, value in merged.items() if value is not None})


class ModelLifecycle(ModelPart, RequestListener):
    """A user's operations on models, by name or alias, while serving continues.

    The dispatcher reports what models need for their requests.

    ``frontend_up``, ``controller.worker_up`` and ``worker_down`` handle starts and ends of
    processes; ``controller.check`` is to be called every second.
    """

    def __init__(
        self,
        parts: ControlParts,
        frontends: Frontends,
        snapshots: ModelSnapshots,
        cache: SnapshotCache,
        inspector: Inspector,
    ) -> None:
        """Wire the parts together; each part gets only finished parts."""
        super().__init__(parts)
        self.inspector = inspector
        self.ongoing = OngoingAdditions(parts.history)
        self.snapshots = snapshots
        self._frontends = frontends
        mounts = ModelMounts(parts, frontends, inspector)
        divisions = Divisions(parts.settings, inspector, parts.registry.divisions)
        self.room = room = EngineRoom(parts, cache, divisions)
        self._failures = Failures(parts)
        performer = Performer(parts, snapshots, mounts, room)
        self.controller = controller = ModelController(
            parts, snapshots, room, mounts, self._failures, performer
        )
        self.mounts = mounts
        self.parking = Parking(parts, self.ongoing)
        self.presets = Presets(parts, mounts, inspector)
        self._additions = Additions(parts, snapshots, controller, mounts, divisions, inspector)
        self.adapters = ModelAdapters(parts, mounts, self.set, inspector)

    def request_began(self, model: str) -> None:
        self.controller.began(model)

    def request_ended(self, model: str, device: int | None) -> None:
        self.controller.ended(model, device)

    def weights_wanted(self, model: str) -> None:
        self.controller.wanted(model)
        self.parking.wanted(model)

    def weights_damaged(self, answer: WrongAnswer) -> None:
        model = answer.model
        text = f"the self-check answered {list(answer.answered)}, not {list(answer.expected)}"
        self._history.record_event("error", "self_check_failed", model, text)
        self._dispatcher.accounts.meters.models[model].self_check_failures += 1
        self._dispatcher.fail_model(
            model, f"the weights of {model} were damaged; the model is reloaded"
        )
        self._fleet.set_damaged(model, is_damaged=True)

    def grammar_refused(self, refused: GrammarRefused) -> None:
        self._frontends.send(refused)

    def convicted(self, model: str, request_id: str) -> None:
        self._failures.convicted(model, request_id)

    def acquitted(self, model: str) -> None:
        self._failures.acquitted(model)

    async def frontend_up(self, frontend: Frontend) -> None:
        """Let a new frontend mount all models; other models are opened without further delay."""
        await self.mounts.mount_all(frontend)
        for name in self._fleet.names():
            if not self._fleet.is_open(name):
                self.controller.wanted(name)

    async def worker_down(self, worker: Worker, death: Death) -> None:
        """Attribute the end of a worker, and requeue the requests there."""
        self._failures.worker_down(worker, death)

    async def stop(self) -> None:
        """Undo unfinished additions, and end all other work; the workers have stopped before."""
        await self.ongoing.stop()
        await self._additions.stop()
        await self.adapters.stop()
        await self.controller.stop()
        await self.parking.stop()
        await self.snapshots.host_budget.stop()

    def add(self, request: AddModelRequest) -> AsyncIterator[Progress]:
        """Add a model, or only check; see :class:`Additions`.

        With ``detach`` the addition goes on after the end of the iteration.
        """
        if request.check_only:
            return self._additions.check(request)
        follow = self.ongoing.detached if request.detach else self.ongoing.followed
        return follow(request.name, self._additions.add(request))

    def add_adapter(self, request: AddAdapterRequest) -> AsyncIterator[Progress]:
        """Add an adapter, or only check; see :meth:`ModelAdapters.add`."""
        return self.ongoing.followed(request.name, self.adapters.add(request))

    async def set(self, name: str, request: SetModelRequest) -> ModelRow:
        """Change targets, aliases and options of a model while the model serves.

        Raises:
            Refused: the name is a preset's or adapter's.
            GpupoolError: see ``Registry.update``, or why the options are not changed.
        """
        spec = (await self.find(name)).spec
        check_own_model(spec, name, "options")
        async with self._fleet.alone(spec.name, beside_steps=not request.engine):
            old = (await self.find(spec.name)).spec
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
            if row.spec.aliases != old.aliases:
                await self.mounts.mount(old.name)
            await self.mounts.publish()
            text = "options changed" if request.engine else "targets, pace or aliases changed"
            self._history.record_event("info", "model_changed", old.name, text)
            return row

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove a model, preset or adapter; see also :meth:`Presets.remove` and
        :meth:`ModelAdapters.remove`.

        Raises:
            NoSuchModel: there is no such name.
            Refused: the model has live requests or adapters and ``mode`` is "refuse".
            TimedOut: requests were left after the drain timeout.
        """
        row = await self.find(name)
        match row.spec.further_named(name):
            case Adapter():
                return await self.adapters.remove(name, mode)
            case Preset():
                return await self.presets.remove(name)
            case None if mode == "force":
                return await self._remove_by_force(row)
            case None:
                return await self._remove(name, mode)

    async def _remove_by_force(self, row: ModelRow) -> ModelRow:
        """Remove a model; a load that does not stop is ended with its worker."""
        name = row.spec.name
        self._additions.cancel(name)
        ending = asyncio.create_task(self._end_loads(name), name=f"end-loads-{name}")
        try:
            return await self._remove(name, "force")
        except NoSuchModel:
            return row  # the addition has been undone meanwhile
        finally:
            ending.cancel()

    async def _end_loads(self, name: str) -> None:
        while True:
            await asyncio.sleep(LOAD_GRACE_S)
            reason = f"the load of {name} did not stop within {LOAD_GRACE_S:g} s of its removal"
            self._supervisor.end_loads(name, reason)

    async def warm(self, name: str) -> ModelRow:
        """Restore a model's snapshot to host memory, and load the model on workers without an
        engine.

        A model in quarantine is tried too.

        Raises:
            NoSuchModel: the model is not registered.
            GpupoolError: the reason of the failure.
        """
        row = await self.find(name)
        self._fleet.breakers.reset(row.spec.name)
        await self.controller.warm(row.spec.name)
        return await self.find(name)

    async def _set_engine(self, old: ModelSpec, engine: dict[str, str]) -> ModelSpec:
        """Change the options of the model's engines and API; after a failure the earlier hold.

        Raises:
            Refused: a device of the model cannot divide the model with these options.
            GpupoolError: the reason of a worker or of the frontends.
        """
        _check_takes_adapters(old, engine)
        new, divisions = replace(old, engine=engine), self.room.divisions
        known = divisions.said(old)
        await divisions.check(new)
        lacking = divisions.lacking(new).intersection(self._fleet.availability(old.name).devices)
        if lacking:
            raise divisions.refusal(new, sorted(lacking))
        has_same_engine = await self._have_same_engine(old, new)
        try:
            await self._apply(old, new, has_same_engine=has_same_engine)
        except BaseException:

            async def take_back() -> None:
                try:
                    await self._registry.set_engine(old.name, old.engine)
                    await self._apply(new, old, has_same_engine=has_same_engine)
                except GpupoolError as error:
                    _logger.error("%s has the earlier options again: %s", old.name, error)
                await divisions.keep(old, known)

            await uncut(take_back())
            raise
        await divisions.keep(new)
        self.snapshots.drop_outdated(old.name)
        return new

    async def _apply(self, old: ModelSpec, new: ModelSpec, *, has_same_engine: bool) -> None:
        name = new.name
        for number in self._fleet.availability(name).devices if has_same_engine else ():
            host = self._fleet.hosts.of(name, number)
            host.options = new.engine if host.options == old.engine else host.options
        await self.controller.replace(name, new.engine)
        # Not before: after a power loss the model would have options that no engine has taken.
        self._fleet.changed((await self._registry.set_engine(name, new.engine)).spec)
        await self.mounts.mount(name)

    async def _have_same_engine(self, old: ModelSpec, new: ModelSpec) -> bool:
        """Return whether the options that differ concern only the API.

        Engines have the parser of reasoning too, which may be found in another chat template.
        """
        if engine_part(old.engine) != engine_part(new.engine):
            return False
        before, after = [await self.inspector.parsers(spec) for spec in (old, new)]
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
        model = (await self.find(name)).spec.name
        async with self._fleet.alone(model):
            now = await self.find(model)
            chosen = sorted(set(devices))
            self.room.divisions.require_one(replace(now.spec, devices=tuple(chosen)))
            row = await self._registry.set_devices(model, chosen)
            self._fleet.changed(row.spec)
        where = ", ".join(map(str, row.spec.devices))
        text = f"on devices {where}, by hand" if devices else "as the scheduler chooses"
        self._history.record_event("info", "model_placed", model, text)
        if devices:
            self._fleet.check_quarantine(model)
            errors = await self.controller.settle(model)
            hosts, workers = self._fleet.availability(model).devices, self._supervisor.workers
            lacking = [
                number for number in chosen if workers[number].is_ready and number not in hosts
            ]
            if lacking:
                raise errors[0] if errors else self._why_unloaded(row, lacking[0])
        return await self.find(model)

    def _why_unloaded(self, row: ModelRow, number: int) -> GpupoolError:
        """Return why a settled model is not on a device: memory of the host or of the device."""
        name, snapshots = row.spec.name, self._fleet.snapshots
        degree = snapshots.degree(number) if snapshots.needing([number]) else 0
        space = self.snapshots.weights(name, degree, row.weight_bytes).space
        if degree and space in (Space.LATER, Space.NEVER):
            return self.snapshots.why_full(name, degree, row.weight_bytes)
        return self.room.refusal(row)

    async def _remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove a model.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the model has live requests or adapters and ``mode`` is "refuse".
            TimedOut: requests were left after the drain timeout.
        """
        row = await self.find(name)
        model = row.spec.name
        if not self._fleet.knows(model):
            raise NoSuchModel(f"no model is named {name!r}", f"{model} is being added")
        try:
            if mode == "refuse":
                _check_without_adapters(row.spec)
                self._check_idle(model)
            with self._fleet.draining(model):
                if mode == "drain":
                    await self._wait_idle(model)
                # A change of options by another user may belong to the addition of an adapter.
                waits = mode == "refuse" and self._fleet.is_held(model)
                if not (waits or self.controller.is_added(model)):
                    self.controller.abandon(model, "was removed")
                async with self._fleet.alone(model):
                    now = await self._registry.get(model)
                    if now is None or now.created_at != row.created_at:
                        return row  # another removal was faster
                    if mode == "refuse":
                        _check_without_adapters(now.spec)
                    try:
                        await self.controller.remove(model, "was removed")
                    finally:
                        if not self._fleet.knows(model):
                            self._history.record_event("info", "model_removed", model, "removed")
        finally:
            await self.mounts.publish()
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
