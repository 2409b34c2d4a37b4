"""The steps before a registration: finding, downloading and checking a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from gpupoold.api.schemas_models import AddModelRequest, ModelInfo, Progress
from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.checkpoints.download import Part, checkpoint_dir, download
from gpupoold.checkpoints.fit import check_fits
from gpupoold.checkpoints.hub import Hub
from gpupoold.checkpoints.hub_cache import FoundSnapshot, find_snapshot
from gpupoold.checkpoints.manifest import read_manifest
from gpupoold.checkpoints.peers import Peers
from gpupoold.checkpoints.resolve import HubSource, LocalSource, resolve
from gpupoold.checkpoints.selection import Content
from gpupoold.checkpoints.survey import CheckpointSurvey
from gpupoold.config.schema import Settings
from gpupoold.control.access.membership import read_secret
from gpupoold.control.models.divisions import Divisions
from gpupoold.control.models.info import with_parsers
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.control.models.specs import checked_info, spec_of
from gpupoold.control.weights.cache import SnapshotId
from gpupoold.control.weights.host_budget import HostMemoryBudget
from gpupoold.domain import ModelSpec
from gpupoold.engine_options.names import check_options
from gpupoold.errors import Refused, Unavailable
from gpupoold.memory.memfd import available_bytes
from gpupoold.units import format_bytes

# Beside the weights, a device needs memory for the KV of a short request.
_MIN_KV_SHARE = 0.02


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
        self._survey: CheckpointSurvey
        self._is_checked = False  # by vLLM's classes, before the weights are downloaded
        self._engine: dict[str, str] = {}
        self.weight_bytes = 0
        """Device bytes of the weights, estimated from the files."""

    async def steps(self) -> AsyncIterator[Progress]:
        """Resolve the source, check the checkpoint, and download the checkpoint if needed.

        Everything is checked that the small files, the file sizes and the headers of the weights
        show, before the weights are downloaded. ``check_only`` ends there.

        Raises:
            GpupoolError: the reason of the failing step.
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

        Raises:
            Unavailable: no such device is in service.
        """
        lacking = self._divisions.lacking(spec)
        workers = [one for one in self._supervisor.workers if one.number not in lacking]
        sizes = [one.ready.facts.device_bytes for one in workers if one.is_ready and one.ready]
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
        of = SnapshotId(name)  # whichever degree comes first
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
        content,
        allow_pickle=settings.security.allow_pickle,
        allow_remote_code=settings.security.allow_remote_code,
    )


async def fetched(
    found: HubSource,
    revision: str | None,
    settings: Settings,
    content: Content = "checkpoint",
    part: Part = "all",
    peers: Peers | None = None,
) -> AsyncIterator[Progress]:
    """Download a repository to :func:`folder_of`, and yield the progress.

    Raises:
        GpupoolError: see :func:`download`.
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
        download(
            found.repo_id,
            revision,
            folder_of(found, revision, settings),
            report,
            allow_pickle=settings.security.allow_pickle,
            allow_remote_code=settings.security.allow_remote_code,
            model_dirs=settings.paths.model_dirs,
            content=content,
            part=part,
            peers=peers,
        )
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
