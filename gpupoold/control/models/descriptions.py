"""A model in the registry, in the admin API, in orders for workers, and as latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path

from gpupool_state import ModelRow, ProfilePhase, ProfileRow
from gpupoold.api.schemas_models import AddModelRequest, FoundInfo, ModelInfo
from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.checkpoints.files import config_of_steps
from gpupoold.checkpoints.parsers import FoundParsers
from gpupoold.config.schema import Settings
from gpupoold.domain import ModelName, ModelSpec, ModelState, Targets
from gpupoold.engine_options.names import with_adapter_support
from gpupoold.errors import Refused
from gpupoold.latency.models import LatencyModel, Profile, StoredFit, StoredLatency, SwitchModel
from gpupoold.wire import messages as m
from gpupoold.wire.messages import LoadedModel, WorkerReady

# Settings that decide on the times of steps, and keys of config.json that do not.
_OF_STEPS = ("dtype", "max_model_len", "engine")


def model_info(
    row: ModelRow, state: ModelState | None = None, loaded: LoadedModel | None = None
) -> ModelInfo:
    """Return a registry row as a body of the admin API; ``state`` replaces the stored state.

    ``loaded`` has the facts of the engines, None before the first load.
    """
    spec = row.spec
    described = vars(spec) | {"max_model_len": row.loaded_max_model_len or spec.max_model_len}
    targets = asdict(described.pop("targets"))
    return ModelInfo(
        **described,
        **targets,
        state=(state or row.state).value,
        error=row.error,
        architecture=row.architecture,
        weight_bytes=row.weight_bytes,
        kv_bytes_per_token=row.kv_bytes_per_token,
        created_at=row.created_at,
        latency=latency_on(row.profiles),
        latencies=tuple(latencies_of(row.profiles)),
        engine_bytes=dict(row.engine_bytes),
        tasks=() if loaded is None else loaded.supported_tasks,
    )


def with_parsers(info: ModelInfo, found: FoundParsers) -> ModelInfo:
    """Return the body with a model's parsers and chat template."""
    return replace(
        info,
        tool_parser=FoundInfo(**asdict(found.tool)),
        reasoning_parser=FoundInfo(**asdict(found.reasoning)),
        chat_template=FoundInfo(**asdict(found.chat_template)),
    )


def is_profiled(row: ModelRow, ready: WorkerReady) -> bool:
    """Return whether both phases of this revision are profiled on such a device and engine."""
    known = {
        profile.phase
        for profile in row.profiles
        if profile.device == ready.device_name
        and profile.engine_version == ready.engine_version
        and profile.revision == row.spec.revision
    }
    return {ProfilePhase.PREFILL, ProfilePhase.DECODE} <= known


def profiles_of_sibling(
    row: ModelRow, others: Iterable[ModelRow], ready: WorkerReady
) -> list[ProfileRow]:
    """Return the profiles of a model with equal steps on such a device, none if there is none.

    Fine-tunes of one model have the same kernels and shapes.
    """
    for other in others:
        if is_profiled(other, ready) and have_equal_steps(row.spec, other.spec):
            rows = [profile for profile in other.profiles if profile.device == ready.device_name]
            return [replace(profile, revision=row.spec.revision) for profile in rows]
    return []


def have_equal_steps(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether two models are fine-tunes of one model with equal settings.

    Reads ``config.json`` of both, which are equal except for names and token ids.
    """
    if any(getattr(one, name) != getattr(other, name) for name in _OF_STEPS):
        return False
    try:
        return config_of_steps(Path(one.path)) == config_of_steps(Path(other.path))
    except Refused:
        return False


def profile_rows(
    measured: Profile,
    loaded: LoadedModel,
    revision: str | None,
    ready: WorkerReady,
    measured_at: float,
) -> list[ProfileRow]:
    """Return the registry's rows for a profiling run: one per fit, and one for switches.

    ``measured_at`` is in wall-clock seconds.
    """
    switch = ProfileRow(
        device=ready.device_name,
        phase=ProfilePhase.SWITCH,
        engine_version=ready.engine_version,
        revision=revision,
        dtype=loaded.dtype,
        law=SwitchModel.__name__,
        constants=(ready.facts.bandwidth_bytes_per_s,),
        measured_at=measured_at,
    )
    fits = ((ProfilePhase.PREFILL, measured.prefill), (ProfilePhase.DECODE, measured.decode))
    # A fit's fields are columns of the row by the same names.
    rows = [replace(switch, phase=phase, **asdict(fit)) for phase, fit in fits if fit is not None]
    return [*rows, switch]


def latency_on(profiles: Sequence[ProfileRow], device: str | None = None) -> StoredLatency | None:
    """Return the stored latency of a model on a kind of device, None if not measured.

    The default is the device measured last.
    """
    if device is None and profiles:
        device = profiles[-1].device
    by_phase = {profile.phase: profile for profile in profiles if profile.device == device}
    switch = by_phase.get(ProfilePhase.SWITCH)
    if switch is None:
        return None
    prefill, decode = by_phase.get(ProfilePhase.PREFILL), by_phase.get(ProfilePhase.DECODE)
    return StoredLatency(
        device=switch.device,
        engine_version=switch.engine_version,
        dtype=switch.dtype,
        measured_at=switch.measured_at,
        bandwidth_bytes_per_s=switch.constants[0],
        prefill=_fit(prefill) if prefill else None,
        decode=_fit(decode) if decode else None,
    )


def latencies_of(profiles: Sequence[ProfileRow]) -> list[StoredLatency]:
    """Return the stored latencies of a model, one for each kind of device, the latest last."""
    devices = dict.fromkeys(profile.device for profile in reversed(profiles))
    found = (latency_on(profiles, device) for device in reversed(devices))
    return [latency for latency in found if latency is not None]


def latency_model_of(row: ModelRow, device: str | None = None) -> LatencyModel | None:
    """Return the latency model of a registered model on a kind of device, None while unknown.

    ``device`` is a worker's ``ready.device_name``, by default the device measured last. Raises
    LatencyError: the stored profile has an unknown form.
    """
    stored = latency_on(row.profiles, device)
    return None if stored is None else stored.model()


def _fit(row: ProfileRow) -> StoredFit:
    return StoredFit(**{field.name: getattr(row, field.name) for field in fields(StoredFit)})


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
