"""Which models are measured, and what becomes of the measurements."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from gpupool_state import ModelRow, ProfilePhase
from gpupoold.api.schemas_models import ModelInfo
from gpupoold.control.models.descriptions import (
    is_profiled,
    latency_model_of,
    latency_on,
    model_info,
    profile_rows,
    profiles_of_sibling,
)
from gpupoold.domain import DeviceFacts, ModelName, ModelSpec, ModelState
from gpupoold.latency.models import Fit, FitQuality, LinearDecode, PrefillModel, Profile, StoredFit
from gpupoold.wire.messages import LoadedModel, WorkerReady

A10 = WorkerReady(DeviceFacts(24 << 30, 2 << 20, 2e10), "0.32.0", "NVIDIA A10")
H100 = WorkerReady(DeviceFacts(80 << 30, 2 << 20, 5e10), "0.32.0", "NVIDIA H100")
LOADED = LoadedModel(
    name="a",
    architecture="LlamaForCausalLM",
    max_model_len=4096,
    dtype="bfloat16",
    block_size=16,
    num_gpu_blocks=100,
    weight_bytes=10**9,
    kv_bytes_per_token=1000,
    supported_tasks=("generate",),
)
PREFILL = PrefillModel(4096, 14336, 1e-13, 2e-9, 0.004)
DECODE = LinearDecode(2e-7, 1e-4, 0.01)
QUALITY = FitQuality(0.99, 0.02, 0.05, 9)
MEASURED = Profile(
    StoredFit.of(Fit(PREFILL, QUALITY)), StoredFit.of(Fit(DECODE, QUALITY)), duration_s=1.0
)
SPEC = ModelSpec(ModelName("a"), "org/a", "/models/a", revision="main")
ROW = ModelRow(SPEC, ModelState.READY, "", "LlamaForCausalLM", 10**9, 1000, 4096, 0.0)


def measured_on(*devices: WorkerReady, profile: Profile = MEASURED) -> ModelRow:
    rows = [
        row
        for at, ready in enumerate(devices, start=1_700_000_000)
        for row in profile_rows(profile, LOADED, "main", ready, at)
    ]
    return replace(ROW, profiles=tuple(rows))


def test_rows_become_the_model_again() -> None:
    row = measured_on(A10)
    assert {profile.phase for profile in row.profiles} == set(ProfilePhase)
    model = latency_model_of(row)
    assert model is not None
    assert (model.prefill, model.decode) == (PREFILL, DECODE)
    assert model.switch.bandwidth_bytes_per_s == 2e10
    stored = latency_on(row.profiles)
    assert stored is not None
    assert (stored.prefill, stored.decode) == (MEASURED.prefill, MEASURED.decode)
    assert (stored.device, stored.dtype) == ("NVIDIA A10", "bfloat16")


def test_each_device_has_its_own() -> None:
    row = measured_on(A10, H100)
    bandwidths = {
        device: model.switch.bandwidth_bytes_per_s
        for device in ("NVIDIA A10", "NVIDIA H100")
        if (model := latency_model_of(row, device))
    }
    assert bandwidths == {"NVIDIA A10": 2e10, "NVIDIA H100": 5e10}
    last = latency_on(row.profiles)
    assert last is not None
    assert last.device == "NVIDIA H100"
    assert latency_model_of(row, "NVIDIA L40S") is None


@pytest.mark.parametrize("missing", ["prefill", "decode"])
def test_a_missing_fit_is_no_model_and_measured_again(missing: str) -> None:
    half = Profile(
        None if missing == "prefill" else MEASURED.prefill,
        None if missing == "decode" else MEASURED.decode,
        1.0,
        f"{missing}: too slow",
    )
    row = measured_on(A10, profile=half)
    assert latency_model_of(row) is None
    assert latency_on(row.profiles) is not None
    assert not is_profiled(row, A10)


def test_only_the_same_circumstances_count() -> None:
    row = measured_on(A10)
    assert is_profiled(row, A10)
    assert not is_profiled(ROW, A10)
    assert not is_profiled(row, H100)
    newer = WorkerReady(DeviceFacts(24 << 30, 2 << 20, 2e10), "0.33.0", "NVIDIA A10")
    assert not is_profiled(row, newer)
    assert not is_profiled(replace(row, spec=replace(SPEC, revision="v2")), A10)


@pytest.mark.parametrize(
    ("config", "settings", "is_sibling"),
    [
        ({}, {}, True),
        ({"eos_token_id": [2, 3], "_name_or_path": "org/b"}, {"revision": "v2"}, True),
        ({"hidden_size": 512}, {}, False),
        ({"quantization_config": {"bits": 4}}, {}, False),
        ({}, {"dtype": "float32"}, False),
        ({}, {"engine": {"max_num_seqs": "8"}}, False),
        ({}, {"path": "/nowhere"}, False),
    ],
)
def test_a_fine_tune_takes_the_profile_of_another(
    tmp_path: Path, config: dict[str, Any], settings: dict[str, Any], is_sibling: bool
) -> None:
    base: dict[str, Any] = {"hidden_size": 256, "eos_token_id": 2}
    for name, content in (("a", base), ("b", base | config)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(content))
    known = measured_on(A10, H100)
    known = replace(known, spec=replace(SPEC, path=str(tmp_path / "a")))
    other = {"name": "b", "path": str(tmp_path / "b")} | settings
    row = replace(ROW, spec=replace(SPEC, **other))
    taken = replace(row, profiles=tuple(profiles_of_sibling(row, [row, known], H100)))
    assert is_profiled(taken, H100) == is_sibling
    assert {one.device for one in taken.profiles} <= {"NVIDIA H100"}
    (tmp_path / "b" / "modules.json").write_text("[]")  # a model that embeds
    assert not profiles_of_sibling(row, [known], H100)


_ADAPTER = TypeAdapter(ModelInfo)


def test_the_admin_api_carries_it() -> None:
    info = _ADAPTER.validate_json(_ADAPTER.dump_json(model_info(measured_on(A10))))
    assert info.latency == latency_on(measured_on(A10).profiles)
    assert model_info(ROW).latency is None
