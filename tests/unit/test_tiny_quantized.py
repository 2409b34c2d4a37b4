"""The packed weights of the tiny quantized checkpoints mean the weights that were packed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    unpack_quantized_values_into_int32,
)
from vllm.scalar_type import scalar_types

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.tiny import Recipe
from scripts import tiny_quantized as made

WEIGHT = torch.randn(64, 128, generator=torch.Generator().manual_seed(3))
AWQ_POSITIONS = [0, 4, 1, 5, 2, 6, 3, 7]  # of the columns in an unpacked AWQ word


def unpacked(words: torch.Tensor, dim: int) -> torch.Tensor:
    return unpack_quantized_values_into_int32(words, scalar_types.uint4, dim).float()


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    numbers = unpacked(words, 1)
    return numbers.view(len(words), -1, 8)[..., AWQ_POSITIONS].reshape_as(numbers)


def meant(key: str, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """The weight that a format's tensors stand for, as (out, in)."""
    if key in ("w8a8", "fp8", "fp8-channel"):
        return tensors["weight"].float() * tensors["weight_scale"]
    if key == "w4a16":
        scale = tensors["weight_scale"].float().repeat_interleave(made.GROUP_SIZE, 1)
        return (unpacked(tensors["weight_packed"], 1) - 8) * scale
    scale = tensors["scales"].float().repeat_interleave(made.GROUP_SIZE, 0)
    if key == "gptq":
        zeros = unpacked(tensors["qzeros"], 1).repeat_interleave(made.GROUP_SIZE, 0)
        return ((unpacked(tensors["qweight"], 0) - zeros - 1) * scale).t()
    zeros = awq_columns(tensors["qzeros"]).repeat_interleave(made.GROUP_SIZE, 0)
    return ((awq_columns(tensors["qweight"]) - zeros) * scale).t()


@pytest.mark.parametrize("key", made.FORMATS)
def test_packed_weights_are_near_the_weights(key: str) -> None:
    error = (meant(key, made.FORMATS[key].quantize(WEIGHT)) - WEIGHT).abs().max()
    assert error < {"w8a8": 0.02}.get(key, 0.3)
    assert error > 0


def test_a_checkpoint_is_complete_and_packed(tmp_path: Path) -> None:
    recipe = Recipe("llama", 4_000_000)
    folder = made.make_quantized(tmp_path, "gptq", recipe)
    info = check_checkpoint(folder, allow_pickle=False, allow_remote_code=False)
    assert info.quantization == "gptq"
    assert info.dtype == "float16"
    tensors = load_file(folder / "model.safetensors")
    assert tensors["model.layers.0.self_attn.q_proj.qweight"].dtype == torch.int32
    assert tensors["lm_head.weight"].dtype == torch.float16
    assert json.loads((folder / "config.json").read_text())["quantization_config"]["bits"] == 4
    changed = (folder / "config.json").stat().st_mtime_ns
    assert made.make_quantized(tmp_path, "gptq", recipe) == folder
    assert (folder / "config.json").stat().st_mtime_ns == changed
