"""Additions of models by a client, step by step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import cast

from gpupool_state import History, ModelRow
from gpupoold.api.schemas import AdditionInfo
from gpupoold.api.schemas_models import AddModelRequest, Progress
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.divisions import Divisions
from gpupoold.control.models.info import model_info
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.intake import Intake
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import check_names_free, find_model
from gpupoold.control.models.parts import ControlParts, ModelPart, uncut
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.domain import ModelSpec, ModelState
from gpupoold.errors import GpupoolError, Refused

_logger = logging.getLogger(__name__)


class Additions(ModelPart):
    """Checks, registers and loads new models; a failed addition leaves nothing."""

    def __init__(
        self,
        parts: ControlParts,
        snapshots: ModelSnapshots,
        controller: ModelController,
        mounts: ModelMounts,
        divisions: Divisions,
        inspector: Inspector,
    ) -> None:
        super().__init__(parts)
        self._parts = parts
        self._snapshots = snapshots
        self._controller = controller
        self._mounts = mounts
        self._divisions = divisions
        self._inspector = inspector
        self._tasks: dict[str, asyncio.Task[ModelRow]] = {}

    async def check(self, request: AddModelRequest) -> AsyncIterator[Progress]:
        """Find and check a model without adding the model.

        Raises:
            GpupoolError: the reason of the failing step.
        """
        self._supervisor.check_devices(request.devices)
        await check_names_free(self._registry, (request.name, *request.aliases))
        intake = self._intake(request)
        async for step in intake.steps():
            yield step
        yield Progress(stage="check", model=await intake.preview(time.time()))

    async def add(self, request: AddModelRequest) -> AsyncIterator[Progress]:
        """Register a model; undo all steps after a failure or when the reader leaves.

        The model serves from its first device on, and then stays. The last line follows when all
        devices in service that should host the model have loaded the model, or have failed.

        Raises:
            GpupoolError: the reason of the failing step.
        """
        self._supervisor.check_devices(request.devices)
        names = (request.name, *request.aliases)
        await check_names_free(self._registry, names)
        proposal = self._fleet.propose(names)
        try:
            intake = self._intake(request)
            async for step in intake.steps():
                self._fleet.at_stage(request.name, step.stage)
                yield step
            yield Progress(stage="load", total_bytes=intake.weight_bytes)
        except BaseException:
            self._fleet.drop_proposal(proposal)
            raise
        # A separate task, which undoes its steps when the reader leaves.
        task = asyncio.create_task(self._register_and_load(intake.spec, intake.weight_bytes))
        self._tasks[request.name] = task
        self._fleet.began(request.name, task)
        task.add_done_callback(lambda _: self._tasks.pop(request.name, None))
        task.add_done_callback(lambda _: self._fleet.drop_proposal(proposal))
        try:
            row = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(f"{request.name} was removed while being added") from None
            raise
        finally:
            task.cancel()
        if len(self._supervisor.workers) > 1:
            yield Progress(stage="spread")
            await self._controller.settle(row.spec.name)
        yield Progress(stage="ready", model=model_info(row))

    def cancel(self, name: str) -> None:
        """Undo the addition of a registered model in the background, if it is under way."""
        if (task := self._tasks.get(name)) is not None:
            task.cancel()

    async def stop(self) -> None:
        """Undo unfinished additions; the workers have stopped before."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _intake(self, request: AddModelRequest) -> Intake:
        budget = self._snapshots.host_budget
        return Intake(self._parts, request, budget, self._divisions, self._inspector)

    async def _register_and_load(self, spec: ModelSpec, weight_bytes: int) -> ModelRow:
        # A cancellation may come after the write, so the write is always waited for.
        registering = asyncio.create_task(self._register(spec))
        try:
            await asyncio.shield(registering)
            await self._divisions.keep(spec)
            self._fleet.loading(spec.name)
            await self._registry.set_state(spec.name, ModelState.LOADING)
            await self._controller.add(spec.name, weight_bytes)
        except BaseException as error:
            reason = str(error) or "the client disconnected"
            await uncut(self._undo(registering, spec.name, reason))
            raise
        finally:
            self._controller.end_addition(spec.name)
        self._snapshots.touch(spec.name)  # else a new engine would be the first to be evicted
        text = f"serving from {spec.path}"
        self._history.record_event("info", "model_added", spec.name, text)
        return await find_model(self._registry, spec.name)

    async def _register(self, spec: ModelSpec) -> ModelRow:
        added = await self._registry.add(spec)
        self._fleet.register(spec)
        return added

    async def _undo(self, registering: asyncio.Task[ModelRow], name: str, reason: str) -> None:
        await registering
        try:
            await self._controller.remove(name, "was not added")
        finally:
            self._history.record_event("error", "model_refused", name, reason)
            await self._mounts.publish()


class OngoingAdditions:
    """The additions of models and adapters that have begun and not ended; by name."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._latest: dict[str, Progress] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def infos(self) -> list[AdditionInfo]:
        """Return the latest step of each addition."""
        fields = set(AdditionInfo.model_fields) - {"name"}
        return [
            AdditionInfo(name=name, **step.model_dump(include=fields))
            for name, step in self._latest.items()
        ]

    async def followed(
        self, name: str, steps: AsyncIterator[Progress]
    ) -> AsyncGenerator[Progress, None]:
        """Yield the steps of an addition, which ends when the reader leaves."""
        own: Progress | None = None
        try:
            async with aclosing(cast("AsyncGenerator[Progress, None]", steps)):
                async for step in steps:
                    own = self._latest[name] = step
                    yield step
        finally:
            # A second addition of the name is refused before its first step.
            if own is not None and self._latest.get(name) is own:
                del self._latest[name]

    async def detached(
        self, name: str, steps: AsyncIterator[Progress]
    ) -> AsyncGenerator[Progress, None]:
        """Yield the steps up to the end of the checks; the rest goes on without a reader.

        The last step has the stage ``detached``. A later failure is an event.
        """
        followed = self.followed(name, steps)
        was_checked = False
        async for step in followed:
            if was_checked and step.stage != "check":
                task = asyncio.create_task(self._finish(name, step.stage, followed))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                yield Progress(stage="detached")
                return
            was_checked = was_checked or step.stage == "check"
            yield step

    async def stop(self) -> None:
        """End the additions without a reader."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _finish(self, name: str, stage: str, steps: AsyncGenerator[Progress, None]) -> None:
        try:
            async with aclosing(steps):
                async for step in steps:
                    stage = step.stage
        except GpupoolError as error:
            _logger.warning("%s was not added: %s", name, error)
            if stage != "load":  # failed loads are recorded by the addition
                self._history.record_event("error", "model_refused", name, str(error))
