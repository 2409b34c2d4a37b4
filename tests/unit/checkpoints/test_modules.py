"""Checkpoints in the layout of sentence-transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from gpupoold.checkpoints.check import check_checkpoint, check_modules, is_pooling
from gpupoold.checkpoints.layout import files_to_download, is_weight_file
from gpupoold.errors import Refused

POOLING = "sentence_transformers.models.Pooling"
FILES = [
    "config.json",
    "model.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "1_Pooling/config.json",
    "2_Dense/config.json",
    "2_Dense/model.safetensors",
    "2_Dense/pytorch_model.bin",
    "onnx/model.safetensors",
    "onnx/config.json",
    "1_Pooling/deep/config.json",
    "openvino/2_Dense/config.json",
]


def test_modules_are_downloaded_with_the_model() -> None:
    wanted = files_to_download(FILES, allow_pickle=False, allow_remote_code=False)
    assert set(wanted) == set(FILES[:7])
    assert is_weight_file("2_Dense/model.safetensors")
    with_pickle = files_to_download(FILES, allow_pickle=True, allow_remote_code=False)
    assert set(with_pickle) == set(FILES[:8])
    plain = [name for name in FILES if name != "modules.json"]
    wanted = files_to_download(plain, allow_pickle=False, allow_remote_code=False)
    assert not any("/" in name for name in wanted)


@pytest.mark.parametrize(
    ("modules", "reason"),
    [
        ([{"type": POOLING, "path": "1_Pooling"}], "has no config.json"),
        ([{"type": POOLING, "path": "../other"}], "outside of the checkpoint"),
        ([{"type": POOLING, "path": "/etc"}], "outside of the checkpoint"),
        ({"type": POOLING}, "is no list of modules"),
        ([{"type": POOLING}], "is no list of modules"),
        ([{"type": "x", "path": ""}] * 33, "is no list of modules"),
    ],
)
def test_missing_modules_are_told(tmp_path: Path, modules: object, reason: str) -> None:
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(Refused, match=reason):
        check_modules(tmp_path)


def test_a_damaged_list_is_told(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text("[" * 100_000)
    with pytest.raises(Refused, match="is not valid JSON"):
        check_modules(tmp_path)


def test_the_pooling_folder_is_required(
    tiny_pooling_models: dict[str, Path], tmp_path: Path
) -> None:
    whole = tiny_pooling_models["tiny-bert-embed"]
    info = check_checkpoint(whole, allow_pickle=False, allow_remote_code=False)
    assert info.architecture == "BertModel"
    copy = shutil.copytree(whole, tmp_path / "copy")
    shutil.rmtree(copy / "1_Pooling")
    with pytest.raises(Refused, match=r"the module '1_Pooling' has no config\.json"):
        check_checkpoint(copy, allow_pickle=False, allow_remote_code=False)


def test_pooling_checkpoints_are_told_from_others(
    tiny_pooling_models: dict[str, Path], tmp_path: Path
) -> None:
    for path in tiny_pooling_models.values():
        [architecture] = json.loads((path / "config.json").read_text())["architectures"]
        assert is_pooling(path, architecture), path
    for architecture in ("LlamaForCausalLM", "GPT2LMHeadModel", "Gemma3ForConditionalGeneration"):
        assert not is_pooling(tmp_path, architecture)
