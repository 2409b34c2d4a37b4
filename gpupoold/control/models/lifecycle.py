"""The parts that manage models, behind one object."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddModelRequest,
    Progress,
    SetModelRequest,
)
from gpupoold.control.frontends.frontends import Frontends
from gpupoold.control.models.adapters import ModelAdapters
from gpupoold.control.models.additions import Additions
from gpupoold.control.models.changes import Changes
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.divisions import Divisions
from gpupoold.control.models.drains import Drains
from gpupoold.control.models.engine_room import EngineRoom
from gpupoold.control.models.failures import Failures
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import check_own_model, find_model
from gpupoold.control.models.ongoing import OngoingAdditions
from gpupoold.control.models.parking import Parking
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.perform import Performer
from gpupoold.control.models.presets import Presets
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.processes.crash_attribution import Death
from gpupoold.control.requests.replies import RequestListener
from gpupoold.control.weights.cache import SnapshotCache
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Adapter, Preset, RemoveMode
from gpupoold.errors import NoSuchModel
from gpupoold.wire.messages import GrammarRefused, WrongAnswer

LOAD_GRACE_S = 20.0
"""Time for the load of a removed model to stop; a worker has no other means to end it."""


class ModelLifecycle(ModelPart, RequestListener):
    """A user's operations on models, by name or alias, while serving continues.

    The dispatcher reports what models need for their requests.

    ``mounts``, ``controller.worker_up`` and ``worker_down`` handle starts and ends of processes;
    ``controller.check`` is to be called every second.
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
        self._snapshots = snapshots
        self._frontends = frontends
        mounts = ModelMounts(parts, frontends, inspector)
        divisions = Divisions(parts.settings, inspector, parts.registry.divisions)
        self.room = room = EngineRoom(parts, cache, divisions)
        self._failures = failures = Failures(parts)
        performer = Performer(parts, snapshots, mounts, room)
        self.controller = controller = ModelController(
            parts, snapshots, room, mounts, failures, performer
        )
        self.mounts = mounts
        self.parking = Parking(parts)
        self.drains = Drains(parts)
        self.presets = Presets(parts, mounts, inspector)
        self._additions = Additions(parts, snapshots, controller, mounts, divisions, inspector)
        self._changes = Changes(parts, self.drains, controller, room, mounts, snapshots, inspector)
        self.place = self._changes.place
        self.adapters = ModelAdapters(parts, mounts, self.drains, self._changes.set, inspector)

    def request_began(self, model: str) -> None:
        self.controller.began(model)

    def request_ended(self, model: str, device: int | None) -> None:
        self.controller.ended(model, device)

    def weights_wanted(self, model: str) -> None:
        self.controller.wanted(model)
        self.parking.wanted(model)

    def weights_damaged(self, answer: WrongAnswer) -> None:
        self.controller.damaged(answer)

    def grammar_refused(self, refused: GrammarRefused) -> None:
        self._frontends.send(refused)

    def answered(self, model: str) -> None:
        self._fleet.breakers.answered(model)

    def convicted(self, model: str, request_id: str) -> None:
        self._failures.convicted(model, request_id)

    def acquitted(self, model: str) -> None:
        self._failures.acquitted(model)

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
        await self._snapshots.host_budget.stop()

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
        """See :meth:`Changes.set`.

        Raises:
            Refused: the name is a preset's or adapter's.
        """
        check_own_model((await self.find(name)).spec, name, "options")
        return await self._changes.set(name, request)

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove a model, preset or adapter; see :meth:`Changes.remove`,
        :meth:`Presets.remove` and :meth:`ModelAdapters.remove`.
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
                return await self._changes.remove(name, mode)

    async def _remove_by_force(self, row: ModelRow) -> ModelRow:
        """Remove a model; a load that does not stop is ended with its worker."""
        name = row.spec.name
        self._additions.cancel(name)
        ending = asyncio.create_task(self._end_loads(name), name=f"end-loads-{name}")
        try:
            return await self._changes.remove(name, "force")
        except NoSuchModel:
            return row  # the addition has been undone meanwhile
        finally:
            ending.cancel()

    async def _end_loads(self, name: str) -> None:
        while True:
            await asyncio.sleep(LOAD_GRACE_S)
            reason = f"the load of {name} did not stop within {LOAD_GRACE_S:g} s of its removal"
            self._supervisor.end_loads(name, reason)

    async def find(self, name: str) -> ModelRow:
        """See :func:`find_model`."""
        return await find_model(self._registry, name)

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
