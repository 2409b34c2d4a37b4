"""Folders of LoRA adapters: what is read from good ones, and what is said about bad ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from gpupoold.checkpoints.adapter_check import AdapterFacts, check_adapter
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples

Q = "model.layers.0.self_attn.q_proj"
CONFIG = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def tensors(
    module: str = Q, rank: int = 4, num_in: int = 32, num_out: int = 64
) -> dict[str, np.ndarray[Any, Any]]:
    prefix = f"base_model.model.{module}"
    return {
        f"{prefix}.lora_A.weight": np.ones((rank, num_in), dtype="float32"),
        f"{prefix}.lora_B.weight": np.ones((num_out, rank), dtype="float32"),
    }


@pytest.fixture
def base(tmp_path: Path) -> Path:
    weights = save(
        {
            f"{Q}.weight": np.ones((64, 32), dtype="float16"),
            "model.layers.0.mlp.up_proj.qweight": np.ones((4, 4), dtype="int32"),
            "model.embed_tokens.weight": np.ones((128, 32), dtype="float16"),
        }
    )
    return samples.write(tmp_path / "base", samples.checkpoint() | {"model.safetensors": weights})


def adapter(
    folder: Path, content: dict[str, np.ndarray[Any, Any]] | None = None, **config: Any
) -> Path:
    files = {
        "adapter_config.json": json.dumps(CONFIG | config).encode(),
        "adapter_model.safetensors": save(tensors() if content is None else content),
    }
    return samples.write(folder / "adapter", files)


def refusal(path: Path, base: Path, *, pickle: bool = False) -> str:
    with pytest.raises(Refused) as caught:
        check_adapter(path, base, allow_pickle=pickle)
    assert str(path) in caught.value.message
    assert caught.value.hint
    return str(caught.value)


def test_a_good_adapter(tmp_path: Path, base: Path) -> None:
    path = adapter(tmp_path)
    facts = check_adapter(path, base, allow_pickle=False)
    assert facts == AdapterFacts(path, 4, 4 * 4 * (32 + 64), ("q_proj",))


@pytest.mark.parametrize(
    "content",
    [
        tensors("language_model.model.layers.0.self_attn.q_proj"),  # of another release
        tensors("model.layers.0.mlp.up_proj", num_in=7, num_out=9),  # packed: widths unknown
        tensors("lm_head", num_out=128),  # tied to the embedding
        {
            "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((4, 128), "float32"),
            "base_model.model.model.embed_tokens.lora_embedding_B": np.ones((32, 4), "float32"),
        },
    ],
)
def test_names_and_widths_that_fit(
    content: dict[str, np.ndarray[Any, Any]], tmp_path: Path, base: Path
) -> None:
    assert check_adapter(adapter(tmp_path, content), base, allow_pickle=False).rank == 4


def test_the_rank_is_the_largest_of_the_layers(tmp_path: Path, base: Path) -> None:
    path = adapter(tmp_path, tensors(rank=16), rank_pattern={"q_proj": 16})
    assert check_adapter(path, base, allow_pickle=False).rank == 16


@pytest.mark.parametrize(
    "key", ["q_proj", "^model.layers.0.self_attn.q_proj$", r"layers\.\d+\.self_attn\.q_proj"]
)
def test_patterns_of_peft_are_accepted(key: str, tmp_path: Path, base: Path) -> None:
    path = adapter(tmp_path, rank_pattern={key: 4}, alpha_pattern={key: 8.0})
    assert check_adapter(path, base, allow_pickle=False).rank == 4


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"peft_type": "IA3"}, "of type 'IA3', not LORA"),
        ({"peft_type": None}, "of type None"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is ['lm_head']"),
        ({"init_lora_weights": "pissa_niter_4"}, "changes the base's weights too"),
        ({"layer_replication": [[0, 4]]}, "layer_replication"),
        ({"r": 0}, "the rank 0 is not a positive number"),
        ({"r": "8"}, "the rank '8' is not a positive number"),
        ({"r": True}, "the rank True"),
        ({"r": 1024}, "above vLLM's limit of 512"),
        ({"rank_pattern": {"q_proj": 513}}, "above vLLM's limit of 512"),
        ({"rank_pattern": [1]}, "the rank None"),
        ({"rank_pattern": {r"(\w+\.?)+!": 4}}, r"the key '(\\w+\\.?)+!' of rank_pattern"),
        ({"alpha_pattern": {"q_proj|k_proj": 4}}, "no plain name of layers"),
        ({"alpha_pattern": {".*.*.*.*q_proj": 4}}, "no plain name of layers"),
        ({"alpha_pattern": {r"\d+\d+\d+!": 4}}, "no plain name of layers"),
        ({"alpha_pattern": {"q" * 257: 4}}, "no plain name of layers"),
        ({"alpha_pattern": [["q_proj", 4]]}, "alpha_pattern is [['q_proj', 4]], not an object"),
        ({"alpha_pattern": {f"q{n}": 4 for n in range(501)}}, "have 501 keys, at most 500"),
        ({"peft_type": "\x1b" + "x" * 100_000}, "..."),
        ({"use_dora": "x" * 1000}, "..."),
        ({"note": "x" * 1_100_000}, "is larger than the allowed 1 MiB"),
    ],
)
def test_kinds_that_the_engine_does_not_compute(
    config: dict[str, Any], text: str, tmp_path: Path, base: Path
) -> None:
    assert text in refusal(adapter(tmp_path, **config), base)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (tensors("model.layers.0.self_attn.r_proj"), "has no module"),
        (tensors("model.layers.1.self_attn.q_proj"), "has no module"),
        (tensors(num_in=33), "width 33, but the base's layer has the width 32"),
        (tensors(num_in=64, num_out=32), "width 64"),
        (tensors(num_out=65), "width 65"),
        (tensors(rank=5), "has the rank 5, but the configuration says 4"),
        (tensors(rank=3), "no tensor has a rank above 3, but the configuration says 4"),
        ({f"{Q}.weight": np.ones((64, 32), "float32")}, "not the name of a LoRA tensor"),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), "float32")}, "not one lora_A and one lora_B"),
        ({f"{Q}.lora_A.weight": np.ones((4, 32), "int8")}, "is I8 of shape [4, 32]"),
        ({f"{Q}.lora_A.weight": np.ones((4, 32, 1), "float32")}, "F32 of shape [4, 32, 1]"),
        ({}, "has no tensors"),
    ],
)
def test_tensors_that_do_not_fit_the_base(
    content: dict[str, np.ndarray[Any, Any]], text: str, tmp_path: Path, base: Path
) -> None:
    assert text in refusal(adapter(tmp_path, content), base)


def test_missing_files(tmp_path: Path, base: Path) -> None:
    path = adapter(tmp_path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    assert "can run any code" in refusal(path, base)
    assert check_adapter(path, base, allow_pickle=True).modules == ()
    (path / "adapter_model.bin").unlink()
    assert "has no adapter_model.safetensors" in refusal(path, base, pickle=True)
    (path / "adapter_config.json").unlink()
    assert "so it is no adapter" in refusal(path, base)
    assert "`gpupool add-model`" in refusal(base, base)


def test_an_adapter_given_as_a_model(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="gpupool add-adapter"):
        check_checkpoint(adapter(tmp_path), allow_pickle=False, allow_remote_code=False)
