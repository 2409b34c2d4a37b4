"""The steps before a registration: finding, downloading and checking a checkpoint."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from gpupoold.api.schemas import AddModelRequest, ModelInfo, Progress
from gpupoold.checkpoints.check import CheckpointInfo, check_checkpoint
from gpupoold.checkpoints.download import Content, checkpoint_dir, download
from gpupoold.checkpoints.fit import estimate_weight_bytes, fits
from gpupoold.checkpoints.resolve import HubSource, resolve
from gpupoold.config.schema import Settings
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.specs import checked_info, spec_of
from gpupoold.control.weights.host_budget import HostMemoryBudget
from gpupoold.control.workers.workers import WorkerSupervisor
from gpupoold.domain import ModelSpec
from gpupoold.engine_options.names import check_options

# Beside the weights, a device needs memory for the KV of a short request.
_MIN_KV_SHARE = 0.02


class Intake:
    """A request to add a model, up to the spec of the model to load. Changes no state.

    ``spec`` and ``info`` are available after ``steps`` has been exhausted.
    """

    def __init__(
        self,
        request: AddModelRequest,
        settings: Settings,
        supervisor: WorkerSupervisor,
        host_budget: HostMemoryBudget,
        inspector: Inspector,
    ) -> None:
        self._request = request
        self._settings = settings
        self._supervisor = supervisor
        self._host_budget = host_budget
        self._inspector = inspector
        self._info: CheckpointInfo | None = None
        self._spec: ModelSpec | None = None
        self._engine: dict[str, str] = {}

    @property
    def spec(self) -> ModelSpec:
        assert self._spec is not None
        return self._spec

    @property
    def weight_bytes(self) -> int:
        """Device bytes of the weights, estimated from the files."""
        assert self._info is not None
        return estimate_weight_bytes(self._info, self._request.dtype)

    async def steps(self) -> AsyncIterator[Progress]:
        """Resolve the source, download if needed, and check the checkpoint.

        Raises:
            GpupoolError: the reason of the failing step.
        """
        request = self._request
        self._engine = check_options(request.engine)
        yield Progress(stage="resolve")
        found = resolve(request.name, request.source, self._settings.paths.model_dirs)
        if isinstance(found, HubSource):
            path, source = Path(), found.repo_id
            async for step in fetched(found, request.revision, self._settings, "checkpoint"):
                if isinstance(step, Progress):
                    yield step
                else:
                    path = step
        else:
            path, source = found.path, request.source or str(found.path)
        yield Progress(stage="check")
        self._info = await self._check(path)
        spec = spec_of(request, source, path, self._engine)
        await self._inspector.check(spec)
        self._spec = spec

    def preview(self, checked_at: float) -> ModelInfo:
        """Return the model's body for a request with ``check_only``."""
        assert self._info is not None
        return checked_info(self.spec, self._info, self._request.dtype, checked_at)

    async def _check(self, path: Path) -> CheckpointInfo:
        security = self._settings.security
        info = await asyncio.to_thread(
            check_checkpoint,
            path,
            allow_pickle=security.allow_pickle,
            allow_remote_code=security.allow_remote_code,
        )
        weight_bytes = estimate_weight_bytes(info, self._request.dtype)
        sizes = [await self._supervisor.device_bytes(i) for i in self._supervisor.workers]
        least_kv_bytes = int(weight_bytes * _MIN_KV_SHARE)
        fits(info, self._request.dtype, max(sizes), kv_bytes=least_kv_bytes)
        if any(device.kind != "sim" for device in self._settings.devices):
            self._host_budget.check(self._request.name, weight_bytes)
        return info


async def fetched(
    found: HubSource, revision: str | None, settings: Settings, content: Content
) -> AsyncIterator[Progress | Path]:
    """Download a repository; yield the progress, and at the end the folder.

    Raises:
        GpupoolError: see :func:`download`.
    """
    lines: asyncio.Queue[Progress] = asyncio.Queue()

    def report(done_bytes: int, total_bytes: int) -> None:
        lines.put_nowait(Progress(stage="download", done_bytes=done_bytes, total_bytes=total_bytes))

    task = asyncio.create_task(
        download(
            found.repo_id,
            revision,
            checkpoint_dir(settings.paths.download_dir, found.repo_id, revision),
            report,
            allow_pickle=settings.security.allow_pickle,
            allow_remote_code=settings.security.allow_remote_code,
            model_dirs=settings.paths.model_dirs,
            content=content,
        )
    )
    async for line in _until_done(task, lines):
        yield line
    yield await task


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
