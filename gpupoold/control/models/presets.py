"""Presets of models: further names with other defaults."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import AddPresetRequest
from gpupoold.control.models.inspection import Inspector
from gpupoold.control.models.mounts import ModelMounts
from gpupoold.control.models.names import check_names_free, find_model
from gpupoold.control.models.parts import ControlParts, ModelPart
from gpupoold.domain import Preset
from gpupoold.engine_options.defaults import SYSTEM_PROMPT
from gpupoold.errors import GpupoolError, NoSuchModel, UsageError
from gpupoold.json_values import check_json_value

MAX_DEFAULTS = 64
MAX_DEFAULTS_CHARACTERS = 65_536

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}(\.[A-Za-z0-9_-]{1,64}){0,4}")
# Fields that belong to the single request.
_NO_DEFAULTS = frozenset(
    ["input", "messages", "model", "n", "prompt", "request_id", "stream", "stream_options", "user"]
)


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
        spec = (await find_model(self._registry, request.base)).spec
        await self._inspector.check(replace(spec, presets=(preset,)))
        async with self._fleet.alone(spec.name):
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

        Raises:
            NoSuchModel: no preset has this name.
        """
        model = (await find_model(self._registry, name)).spec.name
        async with self._fleet.alone(model):
            spec = (await find_model(self._registry, name)).spec
            if not isinstance(spec.further_named(name), Preset):
                raise NoSuchModel(f"no preset is named {name!r}", "see `gpupool list`")
            row = await self._registry.remove_further(name)
            await self._mounts.remount(row.spec)
        self._history.record_event("info", "preset_removed", row.spec.name, f"preset {name}")
        return row


def check_defaults(defaults: Mapping[str, Any]) -> None:
    """Check names and sizes of a preset's defaults; vLLM's classes check the values further.

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
