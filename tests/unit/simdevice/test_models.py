"""What a device without an engine reads from a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints.dummy import make_dummy_checkpoint
from gpupoold.domain import ModelName
from gpupoold.errors import Refused
from gpupoold.latency.models import DecodeBatch
from gpupoold.latency.shape import builtin_shape
from gpupoold.sim.boxes import Box, models_on
from gpupoold.simdevice.models import KnownModel, know
from gpupoold.wire.messages import ModelToLoad

H800_BYTES = Box(1, "H800").device_bytes


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_dummy_checkpoint(tmp_path_factory.mktemp("dummy-weights"), "Qwen2.5-7B")


def load(path: Path, gpu: str = "H800", device_bytes: int = H800_BYTES, **how: Any) -> KnownModel:
    model = ModelToLoad(name=ModelName("m"), source="a", path=str(path), **how)
    return know(model, gpu, device_bytes)


def test_the_same_model_as_the_simulator_has(checkpoint: Path) -> None:
    known = load(checkpoint)
    simulated = models_on(Box(1, "H800"), {"m": "Qwen2.5-7B"}, known.sim.targets)["m"]
    assert known.sim == simulated


def test_what_frontend_and_registry_receive(checkpoint: Path) -> None:
    loaded, shape = load(checkpoint).loaded, builtin_shape("Qwen2.5-7B")
    assert (loaded.architecture, loaded.dtype) == ("Qwen2ForCausalLM", "bfloat16")
    assert loaded.weight_bytes == shape.weight_bytes
    assert loaded.kv_bytes_per_token == shape.kv_bytes_per_token
    assert loaded.supported_tasks == ("generate",)
    assert loaded.max_model_len == 32768
    kv_bytes = loaded.num_gpu_blocks * loaded.block_size * loaded.kv_bytes_per_token
    assert 0 <= H800_BYTES - shape.weight_bytes - kv_bytes < 16 * shape.kv_bytes_per_token


def test_pooling_models_are_refused(tiny_pooling_models: dict[str, Path]) -> None:
    for name, path in tiny_pooling_models.items():
        with pytest.raises(Refused, match="a simulated device makes tokens only"):
            load(path)
        assert name.startswith("tiny-")


def test_the_profile_predicts_what_the_device_does(checkpoint: Path) -> None:
    known = load(checkpoint)
    profile = known.profile()
    assert profile.prefill is not None
    assert profile.decode is not None
    prefill, decode = profile.prefill.prefill_law(), profile.decode.decode_law()
    assert prefill.predict_s([500]) == pytest.approx(known.sim.latency.prefill_s([500]))
    assert decode.predict_s(DecodeBatch(7, 900)) == pytest.approx(
        known.sim.latency.decode_step_s(7, 900)
    )


def test_longest_request_is_what_has_room(checkpoint: Path) -> None:
    weight_bytes = builtin_shape("Qwen2.5-7B").weight_bytes
    room = weight_bytes + 1000 * builtin_shape("Qwen2.5-7B").kv_bytes_per_token
    assert load(checkpoint, device_bytes=room).loaded.max_model_len == 1000 // 16 * 16
    assert load(checkpoint, device_bytes=room, max_model_len=500).loaded.max_model_len == 500
    with pytest.raises(Refused, match="can hold the KV of 992 tokens, not of 2000"):
        load(checkpoint, device_bytes=room, max_model_len=2000)
    with pytest.raises(Refused, match="can hold the KV of 0 tokens"):
        load(checkpoint, device_bytes=weight_bytes)


def test_dtype_is_the_one_an_engine_would_choose(checkpoint: Path, tmp_path: Path) -> None:
    assert load(checkpoint, dtype="float32").loaded.weight_bytes == 4 * 7615616512
    copy = edited(checkpoint, tmp_path, dtype="float32")
    assert load(copy).loaded.dtype == "bfloat16"


def test_what_has_no_known_latency_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    copy = edited(checkpoint, tmp_path, kv_lora_rank=512)
    with pytest.raises(Refused, match=r"m: the latency on H800 is unknown: .*compressed KV"):
        load(copy)


def edited(checkpoint: Path, folder: Path, **changes: object) -> Path:
    """A copy whose configuration says something else."""
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    config = json.loads((checkpoint / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
