"""Dummy-weights checkpoints: real dimensions, valid files, no room on the disk."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpupoold.checkpoints import dummy as dummy
from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.survey import estimate_weight_bytes
from gpupoold.checkpoints.tiny import ARCHITECTURES
from gpupoold.errors import Refused, UsageError
from gpupoold.latency.shape import builtin_shapes, from_hf_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dummy-weights")


@pytest.mark.parametrize("name", ["Qwen2.5-7B", "Yi-1.5-9B", "Llama-2-13B", "Qwen-72B"])
def test_it_reads_like_the_real_checkpoint(name: str, folder: Path) -> None:
    shape = builtin_shapes()[name]
    path = dummy.make_dummy_checkpoint(folder, name)
    info = check_checkpoint(path, allow_pickle=False, allow_remote_code=False)
    assert info.num_parameters == shape.num_parameters
    assert estimate_weight_bytes(info, "auto") == shape.weight_bytes
    config = json.loads((path / "config.json").read_text())
    assert from_hf_config(config, info.num_parameters) == shape
    on_disk = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert on_disk < 1_000_000
    assert (path / "model.safetensors").stat().st_size > shape.weight_bytes


@pytest.mark.parametrize("name", sorted(builtin_shapes()))
def test_tensors_add_up_for_every_shape(name: str) -> None:
    shape = builtin_shapes()[name]
    tensors = dummy.tensors_of(
        ARCHITECTURES["qwen2" if name.startswith("Qwen") else "llama"], shape
    )
    assert len({tensor.name for tensor in tensors}) == len(tensors)
    vocab_size, hidden = tensors[0].shape
    assert hidden == shape.hidden_size
    assert 32_000 <= vocab_size < 200_000


def test_parameters_that_make_no_vocabulary_are_refused() -> None:
    odd = replace(builtin_shapes()["Qwen2.5-7B"], num_parameters=7_615_616_513)
    with pytest.raises(UsageError, match="no vocabulary size gives"):
        dummy.tensors_of(ARCHITECTURES["qwen2"], odd)


def test_made_once(folder: Path) -> None:
    path = dummy.make_dummy_checkpoint(folder, "Qwen2.5-7B")
    before = (path / "config.json").stat().st_mtime_ns
    assert dummy.make_dummy_checkpoint(folder, "Qwen2.5-7B") == path
    assert (path / "config.json").stat().st_mtime_ns == before


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "dummy-weights-qwen2.5-7b").mkdir()
    with pytest.raises(Refused, match="is not a dummy-weights checkpoint"):
        dummy.make_dummy_checkpoint(tmp_path, "Qwen2.5-7B")


def test_unknown_shape_names_the_known(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'GPT-9': there are Baichuan-7B"):
        dummy.make_dummy_checkpoint(tmp_path, "GPT-9")
    assert list(tmp_path.iterdir()) == []
