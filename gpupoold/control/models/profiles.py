"""Latency profiles between workers, the registry and readers. Pure conversions.

Also decides whether a model must be profiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, fields, replace

from gpupool_state import ModelRow, ProfilePhase, ProfileRow
from gpupoold.latency.models import LatencyModel, SwitchModel
from gpupoold.latency.stored import Profile, StoredFit, StoredLatency
from gpupoold.wire.messages import LoadedModel, WorkerReady


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

    ``device`` is a worker's ``ready.device_name``, by default the device measured last.

    Raises:
        LatencyError: the stored profile has an unknown form.
    """
    stored = latency_on(row.profiles, device)
    return None if stored is None else stored.model()


def _fit(row: ProfileRow) -> StoredFit:
    return StoredFit(**{one.name: getattr(row, one.name) for one in fields(StoredFit)})
