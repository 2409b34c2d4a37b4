"""Additions of models by a client: find, download, check, register and load."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import cast

from gpupool_state import History, ModelRow
from gpupoold.api.schemas import AdditionInfo
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo, Progress, load_text
from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.checkpoints.download import Download, Part, checkpoint_dir
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.hub_cache import FoundSnapshot, find_snapshot
from gpupoold.checkpoints.layout import Content, Wanted
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.checkpoints.peers import Peers
from gpupoold.checkpoints.resolve import HubSource, LocalSource, resolve
from gpupoold.checkpoints.survey import CheckpointSurvey, check_fits
from gpupoold.config.schema import Settings
from gpupoold.control.access import read_secret
from gpupoold.control.models.controller import ModelController
from gpupoold.control.models.descriptions import checked_info, model_info, spec_of, with_parsers
from gpupoold.control.models.inspection import Divisions, Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.parts import ControlParts, ModelPart, check_names_free, uncut
from gpupoold.control.models.snapshots import ModelSnapshots
from gpupoold.control.weights.cache import HostMemoryBudget, SnapshotId
from gpupoold.domain import ModelSpec, ModelState
from gpupoold.engine_options.names import check_options
from gpupoold.errors import Failed, GpupoolError, Refused, Unavailable
from gpupoold.memory.libc import available_bytes
from gpupoold.units import format_bytes

_logger = logging.getLogger(__name__)

# Beside the weights, a device needs memory for the KV of a short request.
_MIN_KV_SHARE = 0.02


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

        Raises GpupoolError: the reason of the failing step.
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

        Raises GpupoolError: the reason of the failing step.
        """
        self._supervisor.check_devices(request.devices)
        names = (request.name, *request.aliases)
        await check_names_free(self._registry, names)
        proposal = self._fleet.propose(names)
        try:
            intake = self._intake(request)
            async for step in intake.steps():
                yield step
            yield Progress(stage="load", total_bytes=intake.weight_bytes)
        except BaseException:
            self._fleet.drop_proposal(proposal)
            raise
        # A separate task, which undoes its steps when the reader leaves.
        task = asyncio.create_task(self._register_and_load(intake, verifies=request.verify))
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
        engines = self._fleet.hosts.engines().get(row.spec.name, {}).values()
        note = next((f"loaded in {load_text(engine.load)}" for engine in engines), "")
        note += ", verified" * request.verify
        yield Progress(stage="ready", note=note, model=model_info(row))

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

    async def _register_and_load(self, intake: Intake, *, verifies: bool) -> ModelRow:
        spec = intake.spec
        # A cancellation may come after the write, so the write is always waited for.
        registering = asyncio.create_task(self._register(spec))
        try:
            await asyncio.shield(registering)
            await self._divisions.keep(spec)
            self._fleet.loading(spec.name)
            await self._registry.set_state(spec.name, ModelState.LOADING)
            await self._controller.add(spec.name, intake.weight_bytes)
            if verifies:
                await self._verify(spec.name)
        except BaseException as error:
            reason = str(error) or "the client disconnected"
            await uncut(self._undo(registering, spec.name, reason))
            raise
        finally:
            self._controller.end_addition(spec.name)
        self._snapshots.touch(spec.name)  # else a new engine would be the first to be evicted
        text = f"serving from {spec.path}"
        self._history.record_event("info", "model_added", spec.name, text)
        return await self.find(spec.name)

    async def _verify(self, name: str) -> None:
        """Compare the model's answers amid switches and migrations with undisturbed ones.

        Raises Failed: an answer differs.
        """
        number = min(self._fleet.hosts.engines()[name])
        worker = self._supervisor.workers[number]
        result = cast("dict[str, str]", await self._supervisor.call(worker, "verify", model=name))
        if result["problem"]:
            text = f"{name} is not exact on device {number}: {result['problem']}"
            raise Failed(text, "add the model without --verify to serve it nevertheless")

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

    @property
    def are_under_way(self) -> bool:
        return bool(self._latest)

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


class Intake(ModelPart):
    """A request to add a model, up to the spec of the model to load. Changes no state.

    ``spec`` and ``weight_bytes`` are available after ``steps`` has been exhausted.
    """

    def __init__(
        self,
        parts: ControlParts,
        request: AddModelRequest,
        host_budget: HostMemoryBudget,
        divisions: Divisions,
        inspector: Inspector,
    ) -> None:
        super().__init__(parts)
        self._request = request
        self._host_budget = host_budget
        self._divisions = divisions
        self._inspector = inspector
        secret = read_secret(self._settings.paths.state_dir) if request.peers else ""
        self._peers = Peers(request.peers, secret)
        self.spec: ModelSpec
        self.weight_bytes = 0
        self._survey: CheckpointSurvey
        self._is_checked = False  # by vLLM's classes, before the weights are downloaded
        self._engine: dict[str, str] = {}

    async def steps(self) -> AsyncIterator[Progress]:
        """Resolve the source, check the checkpoint, and download the checkpoint if needed.

        Everything is checked that the small files, the file sizes and the headers of the weights
        show, before the weights are downloaded. ``check_only`` ends there. Raises GpupoolError: the
        reason of the failing step.
        """
        request = self._request
        self._engine = check_options(request.engine)
        yield Progress(stage="resolve")
        found = resolve(request.name, request.source, self._settings.paths.model_dirs)
        if isinstance(found, LocalSource):
            source = request.source or str(found.path)
            async for line in self._checked(found.path, source):
                yield line
            return
        snapshot = await cached(found, request.revision, self._settings)
        if snapshot.note:
            yield Progress(stage="resolve", note=snapshot.note)
        if snapshot.path is not None:
            async for line in self._checked(snapshot.path, found.repo_id):
                yield line
            return
        path = folder_of(found, request.revision, self._settings)
        async for line in fetched(
            found, request.revision, self._settings, part="small files", peers=self._peers
        ):
            yield line
        async for line in self._checked(path, found.repo_id, may_be_remote=True):
            yield line
        if self._survey.is_remote and not request.check_only:
            async for line in fetched(found, request.revision, self._settings, peers=self._peers):
                yield line
            async for line in self._checked(path, found.repo_id):
                yield line

    async def preview(self, checked_at: float) -> ModelInfo:
        """Return the model's body for a request with ``check_only``."""
        info = checked_info(self.spec, self._survey.info, self.weight_bytes, checked_at)
        return with_parsers(info, await self._inspector.parsers(self.spec))

    async def _checked(
        self, path: Path, source: str, *, may_be_remote: bool = False
    ) -> AsyncIterator[Progress]:
        """Check the checkpoint in folder ``path``, whose weights may be on the hub still."""
        yield Progress(stage="check")
        self._survey = await self._inspector.survey(
            path, self._request.dtype, self._engine, may_be_remote=may_be_remote
        )
        self.weight_bytes = self._survey.weight_bytes
        spec = spec_of(self._request, source, path, self._engine)
        await self._divisions.look(spec)
        await self._check_sizes(self._survey.info, spec)
        if not self._is_checked:
            self._is_checked = True
            known = self._divisions.lacking(spec)
            await self._divisions.check(spec)
            if self._divisions.lacking(spec) != known:
                await self._check_sizes(self._survey.info, spec)
        self.spec = spec

    async def _check_sizes(self, info: CheckpointInfo, spec: ModelSpec) -> None:
        """Check that the model fits on a device, and its snapshot in host memory."""
        dtype, weight_bytes = self._request.dtype, self.weight_bytes
        least_kv_bytes = int(weight_bytes * _MIN_KV_SHARE)
        try:
            await self._supervisor.device_sizes()
            largest_bytes = self._largest_device_bytes(spec)
            check_fits(info, dtype, weight_bytes, largest_bytes, kv_bytes=least_kv_bytes)
        except (Refused, Unavailable):  # another device may be of a worker that is not up yet
            await self._supervisor.device_sizes(of_all=True)
            largest_bytes = self._largest_device_bytes(spec)
            check_fits(info, dtype, weight_bytes, largest_bytes, kv_bytes=least_kv_bytes)
        self._check_host_memory(weight_bytes)

    def _largest_device_bytes(self, spec: ModelSpec) -> int:
        """Return the memory of the largest device in service whose GPUs can divide the model.

        Raises Unavailable: no such device is in service.
        """
        lacking = self._divisions.lacking(spec)
        workers = [worker for worker in self._supervisor.workers if worker.number not in lacking]
        ready = [worker.ready for worker in workers if worker.is_ready and worker.ready]
        sizes = [facts.facts.device_bytes for facts in ready]
        if not sizes:
            raise Unavailable(
                f"no device in service can divide {spec.name} among its GPUs", "see `gpupool ps`"
            )
        return max(sizes)

    def _check_host_memory(self, weight_bytes: int) -> None:
        """Check that a snapshot fits in the model cache, and in the memory that is free now.

        Devices of another degree rest if there is no room for a snapshot of each degree.
        """
        name = self._request.name
        of = SnapshotId(name)  # whichever degree comes first; other devices may rest
        if self._settings.simulated_host.memory_bytes is not None:
            self._host_budget.check(of, weight_bytes)
        elif any(device.kind != "sim" for device in self._settings.devices):
            freed_bytes = self._host_budget.check(of, weight_bytes)
            free_bytes = available_bytes() + freed_bytes
            if weight_bytes > free_bytes:
                raise Refused(
                    f"{name}: a snapshot of {format_bytes(weight_bytes)} needs more than the "
                    f"{format_bytes(free_bytes)} of host memory that are free now",
                    "stop other programs, or free snapshots (`gpupool cache drop`)",
                )


def folder_of(found: HubSource, revision: str | None, settings: Settings) -> Path:
    """Return the folder for the download of a repository."""
    return checkpoint_dir(settings.paths.download_dir, found.repo_id, revision)


async def cached(
    found: HubSource, revision: str | None, settings: Settings, content: Content = "checkpoint"
) -> FoundSnapshot:
    """Return the snapshot in a shared Hugging Face cache; none after an own complete download."""
    manifest = read_manifest(folder_of(found, revision, settings))
    if manifest is not None and manifest.complete:
        return FoundSnapshot(None)
    return await asyncio.to_thread(
        find_snapshot,
        Hub(found.repo_id, settings.paths.model_dirs),
        revision,
        settings.paths.hf_cache,
        _wanted(settings, content),
    )


def _wanted(settings: Settings, content: Content) -> Wanted:
    security = settings.security
    return Wanted(content, security.allow_pickle, security.allow_remote_code)


async def fetched(
    found: HubSource,
    revision: str | None,
    settings: Settings,
    content: Content = "checkpoint",
    part: Part = "all",
    peers: Peers | None = None,
) -> AsyncIterator[Progress]:
    """Download a repository to :func:`folder_of`, and yield the progress.

    Raises GpupoolError: see :meth:`Download.run`.
    """
    lines: asyncio.Queue[Progress] = asyncio.Queue()

    def report(done_bytes: int, total_bytes: int, bytes_per_s: float | None) -> None:
        lines.put_nowait(
            Progress(
                stage="download",
                done_bytes=done_bytes,
                total_bytes=total_bytes,
                bytes_per_s=bytes_per_s,
            )
        )

    task = asyncio.create_task(
        Download(
            Hub(found.repo_id, settings.paths.model_dirs),
            revision,
            folder_of(found, revision, settings),
            report,
            _wanted(settings, content),
            part,
            peers or Peers(),
        ).run()
    )
    async for line in _until_done(task, lines):
        yield line
    await task


async def _until_done(
    task: asyncio.Task[Path], progress: asyncio.Queue[Progress]
) -> AsyncIterator[Progress]:
    """Yield ``progress`` until the task ends; cancel the task if the reader leaves."""
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
