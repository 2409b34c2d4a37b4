"""Numbers of a configuration: every one that is no number, and those of another model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints.check import check_numbers, dotted, numbers
from gpupoold.checkpoints.files import TensorEntry
from gpupoold.checkpoints.survey import CheckpointSurvey, survey_checkpoint
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "head_dim": 16,
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 128,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "pad_token_id": -1,
    "quantization_config": {"bits": 4, "group_size": -1},
    "rms_norm_eps": 1e-5,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0},
    "rope_theta": 10000.0,
    "sliding_window": -1,
    "vocab_size": 1000,
    "vision_config": {"depth": 3, "layer_norm_eps": 1e-6, "patch_sizes": [14, 28]},
}
PLACES = [keys for keys, _ in numbers(CONFIG)]
FILE = Path("config.json")


def changed(keys: tuple[str | int, ...], value: object) -> dict[str, Any]:
    """The configuration with another value in one place."""
    config: dict[str, Any] = json.loads(json.dumps(CONFIG))
    inner: Any = config
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return config


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(Refused) as caught:
        check_numbers(FILE, config)
    return caught.value.message


def test_ordinary_numbers_pass() -> None:
    check_numbers(FILE, CONFIG)
    assert len(PLACES) == 24


@pytest.mark.parametrize("keys", PLACES, ids=dotted)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**30, {"__float__": "NaN"}])
def test_no_place_has_a_number_that_is_none(keys: tuple[str | int, ...], value: object) -> None:
    assert f"config.json: {dotted(keys)} is " in refusal(changed(keys, value))


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("rope_theta", 0, "must be above 0"),
        ("rope_theta", -10000.0, "must be above 0"),
        ("rms_norm_eps", -1e-5, "must not be negative"),
        ("hidden_size", -64, "must not be negative"),
        ("num_hidden_layers", -2, "must not be negative"),
        ("num_attention_heads", -4, "must not be negative"),
        ("head_dim", -16, "must not be negative"),
        ("max_position_embeddings", 10**12, "of the longest context"),
    ],
)
def test_numbers_out_of_range(key: str, value: float, problem: str) -> None:
    assert f"config.json: {key} is {value}, " in (found := refusal(changed((key,), value)))
    assert problem in found


def test_an_infinite_limit_of_time_steps_is_one() -> None:
    check_numbers(FILE, {"time_step_limit": [0.0, math.inf]})
    check_numbers(FILE, {"time_step_limit": [0.0, {"__float__": "Infinity"}]})
    assert "time_step_limit[0] is nan" in refusal({"time_step_limit": [math.nan, math.inf]})


def survey(folder: Path) -> CheckpointSurvey:
    return survey_checkpoint(
        folder, "auto", {}, allow_pickle=False, allow_remote_code=False, may_be_remote=False
    )


@pytest.fixture
def edited(tiny_models: dict[str, Path], tmp_path: Path) -> Iterator[Any]:
    """Surveys the checkpoint with changes of ``config.json``; returns the refusal."""
    checkpoint = tiny_models["tiny-llama"]
    for file in checkpoint.iterdir():
        if file.name != "model.safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")

    def refused(name: str = "config.json", **changes: object) -> str:
        file = tmp_path / name
        before = file.read_text() if file.exists() else "{}"
        file.write_text(json.dumps(json.loads(before) | changes))
        with pytest.raises(Refused) as caught:
            survey(tmp_path)
        file.write_text(before)
        return caught.value.message

    yield refused
    survey(tmp_path)


def test_numbers_of_another_model(edited: Any) -> None:
    assert "num_hidden_layers is 1000000000, but the weights have" in edited(
        num_hidden_layers=1_000_000_000
    )
    assert "but the weights have tensors of" in edited(num_hidden_layers=9)
    assert "hidden_size is 65, but the weights have no tensor" in edited(hidden_size=65)
    assert "vocab_size is 2147483647, but the weights have" in edited(vocab_size=2**31 - 1)
    assert "num_attention_heads is 1000000" in edited(num_attention_heads=1_000_000)
    assert "num_local_experts is 1000000000" in edited(num_local_experts=1_000_000_000)
    assert "audio_config.num_hidden_layers is 1000000000" in edited(
        audio_config={"num_hidden_layers": 1_000_000_000}
    )


def test_other_files_have_numbers_too(edited: Any) -> None:
    for name, key in (
        ("generation_config.json", "temperature"),
        ("quantize_config.json", "damp_percent"),
        ("tokenizer_config.json", "model_max_length"),
    ):
        assert f"{name}: {key} is nan" in edited(name, **{key: math.nan})


def test_tiny_models_of_all_kinds_pass(
    tiny_models: dict[str, Path],
    tiny_pooling_models: dict[str, Path],
    vision_models: dict[str, Path],
) -> None:
    for path in (tiny_models | tiny_pooling_models | vision_models).values():
        assert survey(path).weight_bytes


def test_a_tensor_is_counted_by_its_first_index() -> None:
    from gpupoold.checkpoints.check import TensorFacts

    names = ("model.layers.3.mlp.experts.127.up.weight", "model.norm.weight", "h.1.attn")
    facts = TensorFacts.of(TensorEntry(name, "F16", 8, 0, 16, (4, 2)) for name in names)
    assert facts == TensorFacts(3, frozenset({4, 2}), 4, 4)


def test_duplicates(tmp_path: Path) -> None:
    """Re-used shards: a tensor of another shard than the index says, or of two."""
    files = samples.sharded()
    index = json.loads(files["model.safetensors.index.json"])
    names = sorted(set(index["weight_map"].values()))
    files[names[1]] = samples.both()
    folder = samples.write(tmp_path / "stale", files)
    with pytest.raises(Refused, match=r"'a.embed.weight' should be in model-00001.*alone"):
        survey(folder)
    del files["model.safetensors.index.json"]
    folder = samples.write(tmp_path / "unindexed", files)
    with pytest.raises(Refused, match=r"'a.embed.weight' is in model-00001.*and in model-00002"):
        survey(folder)
