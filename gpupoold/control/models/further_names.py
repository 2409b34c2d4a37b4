"""Further names of models, which serve meanwhile: presets and LoRA adapters."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import (
    AddAdapterRequest,
    AddPresetRequest,
    Progress,
    SetModelRequest,
)
from gpupoold.checkpoints.resolve import HubSource, resolve
from gpupoold.control.models.additions import cached, fetched, folder_of
from gpupoold.control.models.descriptions import model_info
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.parts import ControlParts, ModelPart, check_names_free, uncut
from gpupoold.control.workers.worker import Worker
from gpupoold.domain import Adapter, Preset, RemoveMode
from gpupoold.engine_options.defaults import SYSTEM_PROMPT
from gpupoold.engine_options.names import check_num_adapters, options_for
from gpupoold.errors import GpupoolError, NoSuchModel, UsageError
from gpupoold.json_values import check_json_value

MAX_DEFAULTS = 64
MAX_DEFAULTS_CHARACTERS = 65_536

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z0-9_-]{1,64}){0,4}")
# Fields that belong to the single request.
_NO_DEFAULTS = frozenset(
    ["input", "messages", "model", "n", "prompt", "request_id", "stream", "stream_options", "user"]
)

_logger = logging.getLogger(__name__)


class Presets(ModelPart):
    """Adds presets to models and removes presets; the models serve meanwhile."""

    def __init__(self, parts: ControlParts, mounts: ModelMounts, inspector: Inspector) -> None:
        super().__init__(parts)
        self._mounts = mounts
        self._inspector = inspector

    async def add(self, request: AddPresetRequest) -> ModelRow:
        """Add a preset; return its model.

        Raises:
            NoSuchModel: the model is not registered.
            Refused: the name is taken.
            UsageError: a default has a wrong name or value.
            GpupoolError: the frontends' reason; the preset is not added.
        """
        check_defaults(request.defaults)
        preset = Preset(request.name, request.defaults, request.ttft_s, request.tbt_s)
        await check_names_free(self._registry, (preset.name,))
        spec = (await self.find(request.base)).spec
        await self._inspector.check(replace(spec, presets=(preset,)))
        async with self._fleet.alone(spec.name, beside_steps=True):
            row = await self._registry.add_further(spec.name, preset)
            try:
                await self._mounts.remount(row.spec)
            except GpupoolError:
                await self._mounts.remount((await self._registry.remove_further(preset.name)).spec)
                raise
        self._history.record_event("info", "preset_added", spec.name, f"preset {preset.name}")
        return row

    async def remove(self, name: str) -> ModelRow:
        """Remove a preset; requests under way continue.

        Raises NoSuchModel: no preset has this name.
        """
        model = (await self.find(name)).spec.name
        async with self._fleet.alone(model, beside_steps=True):
            spec = (await self.find(name)).spec
            if not isinstance(spec.further_named(name), Preset):
                raise NoSuchModel(f"no preset is named {name!r}", "see `gpupool list`")
            row = await self._registry.remove_further(name)
            await self._mounts.remount(row.spec)
        self._history.record_event("info", "preset_removed", row.spec.name, f"preset {name}")
        return row


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Check names and sizes of a preset's defaults, whose values vLLM's classes check later.

    Raises:
        UsageError: a name is malformed or belongs to single requests; there is too much text.
        Refused: a value is no JSON that each process can hold.
    """
    if len(defaults) > MAX_DEFAULTS:
        raise UsageError(f"a preset has more than {MAX_DEFAULTS} defaults", "set fewer fields")
    for name in defaults:
        if not _KEY.fullmatch(name):
            raise UsageError(
                f"{name[:80]!r} is not the name of a request's field",
                "use names such as temperature or chat_template_kwargs.enable_thinking",
            )
        if name.partition(".")[0] in _NO_DEFAULTS:
            raise UsageError(
                f"{name!r} cannot have a default", "this field belongs to the single request"
            )
        if any(other.startswith(f"{name}.") for other in defaults):
            raise UsageError(f"{name!r} is set as a whole and by key", "set one of the two")
        if defaults[name] is None:
            raise UsageError(f"{name!r} has the default null", "leave the field out")
        check_json_value(name, defaults[name])
    if not isinstance(defaults.get(SYSTEM_PROMPT, ""), str):
        raise UsageError(f"{SYSTEM_PROMPT} is no text", "give a system message as one text")
    num_characters = len(json.dumps(defaults))
    if num_characters > MAX_DEFAULTS_CHARACTERS:
        raise UsageError(
            f"the defaults have {num_characters:,} characters, more than "
            f"{MAX_DEFAULTS_CHARACTERS:,}",
            "use shorter values",
        )


class ModelAdapters(ModelPart):
    """Adds adapters to models and removes adapters; the bases serve meanwhile.

    ``set_model`` changes options of a model's engine, see :meth:`ModelLifecycle.set`.
    """

    def __init__(
        self,
        parts: ControlParts,
        mounts: ModelMounts,
        set_model: Callable[[str, SetModelRequest], Awaitable[ModelRow]],
        inspector: Inspector,
    ) -> None:
        super().__init__(parts)
        self._mounts = mounts
        self._set_model = set_model
        self._inspector = inspector
        self._last_number = 0
        self._tasks: set[asyncio.Task[ModelRow]] = set()

    async def add(self, request: AddAdapterRequest) -> AsyncIterator[Progress]:
        """Find, check and add an adapter; with ``check_only`` the adapter is not added.

        An engine that does not take the adapter is replaced first; its requests go on. Raises
        GpupoolError: the reason of the failing step; the adapter is not added.
        """
        await check_names_free(self._registry, (request.name,))
        proposal = self._fleet.propose((request.name,))
        try:
            base = await self.find(request.base)
            found: Adapter | None = None
            async for step in self._found(request, base):
                if isinstance(step, Progress):
                    yield step
                else:
                    found = step
            assert found is not None
            if request.check_only:
                yield Progress(stage="check", model=model_info(base))
                return
            yield Progress(stage="load")
            task = asyncio.create_task(self._add(base.spec.name, found))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            try:
                row = await asyncio.shield(task)
            finally:
                task.cancel()
        finally:
            self._fleet.drop_proposal(proposal)
        yield Progress(stage="ready", model=model_info(row))

    async def _found(
        self, request: AddAdapterRequest, base: ModelRow
    ) -> AsyncIterator[Progress | Adapter]:
        """Find, download and check an adapter; yield the progress, and at the end the adapter."""
        yield Progress(stage="resolve")
        check_num_adapters(base.spec.name, base.spec.engine, len(base.spec.adapters) + 1)
        found = resolve(request.name, request.source, self._settings.paths.model_dirs)
        path, source = Path(), request.source or request.name
        if isinstance(found, HubSource):
            source = found.repo_id
            snapshot = await cached(found, request.revision, self._settings, "adapter")
            if snapshot.note:
                yield Progress(stage="resolve", note=snapshot.note)
            if snapshot.path is not None:
                path = snapshot.path
            else:
                path = folder_of(found, request.revision, self._settings)
                async for line in fetched(found, request.revision, self._settings, "adapter"):
                    yield line
        else:
            path = found.path
        yield Progress(stage="check")
        facts = await self._inspector.survey_adapter(path, Path(base.spec.path))
        yield Adapter(
            request.name,
            source,
            str(path),
            request.revision,
            facts.rank,
            request.ttft_s,
            request.tbt_s,
        )

    async def remove(self, name: str, mode: RemoveMode) -> ModelRow:
        """Remove an adapter; its base stays as before.

        Raises:
            NoSuchModel: no adapter has this name.
            Refused: the adapter has live requests and ``mode`` is "refuse".
            TimedOut: requests were left after the drain timeout.
        """
        row = await self.find(name)
        if not isinstance(row.spec.further_named(name), Adapter):
            raise NoSuchModel(f"no adapter is named {name!r}", "see `gpupool list`")
        if mode == "refuse":
            self._check_idle(name)
        with self._mounts.hiding(name):
            if mode == "drain":
                await self._wait_idle(name)
            async with self._fleet.alone(row.spec.name):
                return await self._forget(name)

    async def stop(self) -> None:
        """Undo unfinished additions; the workers have stopped before."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _add(self, base: str, adapter: Adapter) -> ModelRow:
        """Make the engines take the adapter, then add the adapter; undo the addition on failure."""
        row = await self.find(base)
        changes = options_for(row.spec.engine, adapter.rank)
        if changes:
            await self._set_model(row.spec.name, SetModelRequest(engine=dict(changes)))
        async with self._fleet.alone(row.spec.name):
            adapter = await self._numbered(adapter)
            # A cancellation may come after the write, so the write is always waited for.
            writing = asyncio.create_task(self._registry.add_further(row.spec.name, adapter))
            try:
                row = await asyncio.shield(writing)
                await self._load(row.spec.name, adapter)
                await self._mounts.remount(row.spec)
            except BaseException:
                await uncut(self._undo(writing, adapter))
                raise
        text = f"adapter {adapter.name} of rank {adapter.rank} from {adapter.path}"
        self._history.record_event("info", "adapter_added", row.spec.name, text)
        return row

    async def _numbered(self, adapter: Adapter) -> Adapter:
        """Return the adapter with a number that no adapter had since the daemon's start."""
        used = (
            adapter.number for row in await self._registry.list() for adapter in row.spec.adapters
        )
        self._last_number = max(self._last_number, *used, 0) + 1
        return replace(adapter, number=self._last_number)

    async def _load(self, base: str, adapter: Adapter) -> None:
        """Make the adapter known to all engines of its base; later engines get it with the load."""
        number, name, path = adapter.number, adapter.name, adapter.path
        for worker in self._ready_hosts(base):
            await self._supervisor.call(
                worker, "load_adapter", model=base, number=number, name=name, path=path
            )

    async def _unload(self, base: str, adapter: Adapter) -> None:
        for worker in self._ready_hosts(base):
            try:
                await self._supervisor.call(
                    worker, "unload_adapter", model=base, number=adapter.number
                )
            except GpupoolError as error:  # the memory is free after the engine's end at last
                _logger.warning("%s on worker %d: %s", adapter.name, worker.number, error)

    def _ready_hosts(self, base: str) -> list[Worker]:
        """Return the workers with an engine of ``base``, also one that loads."""
        ready = (worker for worker in self._supervisor.workers if worker.is_ready)
        return [worker for worker in ready if self._fleet.hosts.of(base, worker.number).is_ordered]

    async def _forget(self, name: str) -> ModelRow:
        row = await self.find(name)
        adapter = row.spec.further_named(name)
        if not isinstance(adapter, Adapter):
            return row  # another removal was faster
        self._dispatcher.fail_name(name, f"the adapter {name} was removed")
        row = await self._registry.remove_further(name)
        await self._unload(row.spec.name, adapter)
        await self._mounts.remount(row.spec)
        text = f"adapter {name} removed"
        self._history.record_event("info", "adapter_removed", row.spec.name, text)
        return row

    async def _undo(self, writing: asyncio.Task[ModelRow], adapter: Adapter) -> None:
        await writing
        row = await self._registry.remove_further(adapter.name)
        await self._unload(row.spec.name, adapter)
        with contextlib.suppress(GpupoolError):
            await self._mounts.remount(row.spec)
