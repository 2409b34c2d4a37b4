"""Conversions between descriptions of a model. Pure."""

from __future__ import annotations

from pathlib import Path

from gpupool_state import ModelRow
from gpupoold.api.schemas_models import AddModelRequest, ModelInfo
from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.config.schema import Settings
from gpupoold.control.models.info import model_info
from gpupoold.domain import ModelName, ModelSpec, ModelState, Targets
from gpupoold.engine_options.adapter_support import with_adapter_support
from gpupoold.wire import messages as m


def spec_of(request: AddModelRequest, source: str, path: Path, engine: dict[str, str]) -> ModelSpec:
    """Return the registry's spec for an accepted request; ``engine`` has the checked options."""
    return ModelSpec(
        name=ModelName(request.name),
        source=source,
        path=str(path),
        revision=request.revision,
        dtype=request.dtype,
        max_model_len=request.max_model_len,
        targets=Targets(request.ttft_s, request.tbt_s),
        aliases=tuple(request.aliases),
        engine=engine,
        devices=tuple(sorted(set(request.devices))),
        pace=request.pace,
    )


def checked_info(
    spec: ModelSpec, info: CheckpointInfo, weight_bytes: int, checked_at: float
) -> ModelInfo:
    """Return the body of a checked, unregistered model; ``checked_at`` is wall-clock seconds."""
    row = ModelRow(
        spec=spec,
        state=ModelState.REGISTERED,
        error="",
        architecture=info.architecture,
        weight_bytes=weight_bytes,
        kv_bytes_per_token=0,
        loaded_max_model_len=info.max_position_embeddings,
        created_at=checked_at,
    )
    return model_info(row)


def to_load(spec: ModelSpec, settings: Settings) -> m.ModelToLoad:
    """Return the description of a registered model for workers and frontends."""
    return m.ModelToLoad(
        **vars(spec) | {"engine": with_adapter_support(spec.engine)},
        allow_remote_code=settings.security.allow_remote_code,
        media_hosts=settings.security.media_hosts,
        max_images=settings.limits.max_images,
        max_image_pixels=settings.limits.max_image_pixels,
    )
