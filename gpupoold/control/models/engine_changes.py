"""Changes of a model's engine options: another engine is built beside the present engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import replace

from gpupool_state import ModelRow
from gpupoold.control.models.engine_room import EngineRoom
from gpupoold.control.models.facts import LoadFacts
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.models.specs import to_load
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import ModelSpec
from gpupoold.engine_options.names import check_options, engine_part
from gpupoold.errors import GpupoolError
from gpupoold.scheduling.hosting import HostingReason

_logger = logging.getLogger(__name__)


def merged_options(present: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return the options after ``changes``, in which None removes an option.

    Raises:
        UsageError: see :func:`check_options`.
    """
    names = check_options({name: value or "" for name, value in changes.items()})
    merged = {**present, **dict(zip(names, changes.values(), strict=True))}
    return check_options({name: value for name, value in merged.items() if value is not None})


class EngineChanges(ModelPart):
    """Replaces the engines of a loaded model on all its workers: on one, then on all others.

    The present engine serves until the new engine has been loaded. Then the requests of the worker
    go on in the new engine, after the tokens that their clients have.
    """

    def __init__(
        self,
        parts: ControlParts,
        snapshots: ModelSnapshots,
        facts: LoadFacts,
        room: EngineRoom,
        inspector: Inspector,
    ) -> None:
        super().__init__(parts)
        self._snapshots = snapshots
        self._facts = facts
        self._room = room
        self._inspector = inspector

    async def change(self, old: ModelSpec, engine: Mapping[str, str]) -> ModelRow:
        """Replace the model's engines and record the options.

        The caller holds the model's lock and remounts the API.

        After a failure the earlier options hold, on all workers that answer.

        Raises:
            Refused: a device of the model cannot divide the model with these options.
            GpupoolError: the reason of a worker.
        """
        new = replace(old, engine=dict(engine))
        await self._room.divisions.check(new)
        self._check_hosts(new)
        if await self._have_same_engine(old, new):
            return await self._record(new)
        done: list[Worker] = []
        with self._snapshots.host_budget.holding(*self._fleet.needed_snapshots(old.name)):
            await self._leave_resting(old.name)
            try:
                hosts = self._workers_of(old.name)
                degrees = {one.device.num_gpus: one for one in reversed(hosts)}
                firsts = list(degrees.values())
                for worker in firsts:  # makes the snapshot for the others
                    await self._replace(new, worker)
                    done.append(worker)
                await self._replace_all(new, [one for one in hosts if one not in firsts], done)
            except BaseException:
                await self._undo(old, done)
                raise
            self._snapshots.drop_outdated(old.name)
            return await self._record(new)

    async def _have_same_engine(self, old: ModelSpec, new: ModelSpec) -> bool:
        """Return whether the options that differ concern only the API.

        Engines have the parser of reasoning too, which may be found in another chat template.
        """
        if engine_part(old.engine) != engine_part(new.engine):
            return False
        before, after = [await self._inspector.parsers(spec) for spec in (old, new)]
        return before.reasoning.name == after.reasoning.name

    async def _record(self, new: ModelSpec) -> ModelRow:
        row = await self._registry.set_engine(new.name, new.engine)
        await self._room.divisions.keep(new)
        return row

    async def _leave_resting(self, name: str) -> None:
        """Unload resting engines, for whose new snapshots there would be no memory."""
        for number in self._fleet.snapshots.resting(name):
            worker = self._supervisor.workers[number]
            self._dispatcher.unhost(name, worker)
            await self._supervisor.unload(worker, name)

    def _check_hosts(self, spec: ModelSpec) -> None:
        """Check that the devices with the model can divide the model with new options too.

        Raises:
            Refused: the reasons of the devices.
        """
        hosts = self._fleet.availability(spec.name).devices
        lacking = self._room.divisions.lacking(spec).intersection(hosts)
        if lacking:
            raise self._room.divisions.refusal(spec, sorted(lacking))

    def _workers_of(self, name: str) -> list[Worker]:
        numbers = self._fleet.availability(name).devices
        return [self._supervisor.workers[number] for number in numbers]

    async def _replace_all(
        self, spec: ModelSpec, workers: list[Worker], done: list[Worker]
    ) -> None:
        """Replace engines side by side, and add each worker to ``done`` after its success.

        Raises:
            GpupoolError: the first failure, after the end of all.
        """
        replaced = (self._replace(spec, worker) for worker in workers)
        errors = await asyncio.gather(*replaced, return_exceptions=True)
        done += [one for one, error in zip(workers, errors, strict=True) if error is None]
        for error in errors:
            if error is not None:
                raise error

    async def _replace(self, spec: ModelSpec, worker: Worker) -> None:
        given = self._snapshots.cached(spec.name, worker)
        budget_s = self._facts.full_budget_s(worker)
        async with worker.load_lock:
            # Both engines exist for a moment.
            await self._room.make(spec.name, worker, HostingReason.NEEDED, beside_itself=True)
            loaded, fd = await self._supervisor.load(
                worker, to_load(spec, self._settings), given, budget_s
            )
        if fd is not None:
            await self._snapshots.keep_changed(fd, spec, worker, loaded)
        await self._facts.keep_engine_bytes(spec.name, worker, loaded)
        await self._facts.keep(spec, worker, loaded)
        costs = await self._facts.costs(spec.name, worker)
        self._dispatcher.host(spec.targets, loaded.model, costs, worker)
        self._dispatcher.restart_dropped(worker, loaded.dropped)

    async def _undo(self, old: ModelSpec, done: list[Worker]) -> None:
        for worker in done:
            try:
                await self._replace(old, worker)
            except GpupoolError as error:
                number, name = worker.number, old.name
                _logger.error("worker %d keeps the new options of %s: %s", number, name, error)
