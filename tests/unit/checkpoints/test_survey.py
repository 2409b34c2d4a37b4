"""Sizes in other dtypes, and what is said when a model is too large."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from gpupoold.checkpoints.check import CheckpointInfo
from gpupoold.checkpoints.files import DTYPE_BITS
from gpupoold.checkpoints.survey import (
    MODEL_DTYPE_BITS,
    check_fits,
    drafter_elements,
    estimate_weight_bytes,
    why_checkpoint_undivided,
)
from gpupoold.errors import Refused, UsageError

MIB = 2**20

HEADS = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 96}


def info(*elements: tuple[str, int], quantization: str | None = None) -> CheckpointInfo:
    return CheckpointInfo(
        path=Path("/models/m"),
        architecture="LlamaForCausalLM",
        model_type="llama",
        dtype="bfloat16",
        weight_bytes=sum(count * DTYPE_BITS[dtype] // 8 for dtype, count in elements),
        num_parameters=sum(count for _, count in elements),
        elements=elements,
        max_position_embeddings=None,
        quantization=quantization,
        weight_files=("model.safetensors",),
    )


BF16 = info(("BF16", 8 * MIB))
FP32 = info(("F32", 8 * MIB))


class TestEstimate:
    @pytest.mark.parametrize(
        ("checkpoint", "dtype", "mib"),
        [
            (BF16, "auto", 16),
            (BF16, "bfloat16", 16),
            (BF16, "half", 16),
            (BF16, "float32", 32),
            (FP32, "float32", 32),
            (FP32, "float16", 16),
            (FP32, "auto", 16),
            (info(("I32", MIB), ("F16", 2 * MIB)), "float32", 12),
            (info(("F8_E4M3", 4 * MIB), ("BF16", MIB)), "auto", 6),
            (info(("F4", 4 * MIB)), "auto", 2),
        ],
    )
    def test_bytes(self, checkpoint: CheckpointInfo, dtype: str, mib: int) -> None:
        assert estimate_weight_bytes(checkpoint, dtype) == mib * MIB

    def test_unknown_dtype(self) -> None:
        with pytest.raises(UsageError, match="unknown dtype 'int4' \\(use auto, bfloat16"):
            estimate_weight_bytes(BF16, "int4")


def check(checkpoint: CheckpointInfo, dtype: str, device_bytes: int, kv_bytes: int = 0) -> None:
    weight_bytes = estimate_weight_bytes(checkpoint, dtype)
    check_fits(checkpoint, dtype, weight_bytes, device_bytes, kv_bytes=kv_bytes)


class TestCheckFits:
    def test_one_byte_too_many(self) -> None:
        check(BF16, "auto", 20 * MIB, kv_bytes=4 * MIB)
        with pytest.raises(Refused):
            check(BF16, "auto", 20 * MIB - 1, kv_bytes=4 * MIB)

    def test_smaller_dtype_is_offered(self) -> None:
        with pytest.raises(Refused) as caught:
            check(BF16, "float32", 20 * MIB)
        assert "32 MiB of weights (float32) do not fit on a device of 20 MiB" in str(caught.value)
        assert "with dtype bfloat16 the model takes 16 MiB and fits" in caught.value.hint

    def test_needed_bytes_are_told(self) -> None:
        with pytest.raises(Refused) as caught:
            check(BF16, "auto", 10 * MIB, kv_bytes=MIB)
        assert "16 MiB of weights (auto) and 1 MiB of KV do not fit on a device of 10 MiB" in str(
            caught.value
        )
        assert caught.value.hint == (
            "use a device of at least 17 MiB, or a quantized version of the model"
        )

    def test_quantized_one_is_not_offered_quantization(self) -> None:
        with pytest.raises(Refused) as caught:
            check(replace(BF16, quantization="awq"), "auto", MIB)
        assert "quantized" not in caught.value.hint

    @given(
        count=st.integers(1, 2**40),
        stored=st.sampled_from(["F32", "BF16", "I8", "F4"]),
        dtype=st.sampled_from(["auto", *MODEL_DTYPE_BITS]),
        device=st.integers(0, 2**42),
        kv=st.integers(0, 2**32),
    )
    def test_fits_exactly_when_there_is_room(
        self, count: int, stored: str, dtype: str, device: int, kv: int
    ) -> None:
        checkpoint = info((stored, count))
        if estimate_weight_bytes(checkpoint, dtype) + kv <= device:
            check(checkpoint, dtype, device, kv)
        else:
            with pytest.raises(Refused):
                check(checkpoint, dtype, device, kv)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    header = json.dumps(
        {"fc.weight": {"dtype": "F32", "shape": [1024, 1024], "data_offsets": [0, 4 * MIB]}}
    ).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4 * MIB)
    (tmp_path / "model.safetensors").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize("form", ["whole", "dotted", "short"])
def test_a_drafter_in_a_folder_counts(folder: Path, form: str) -> None:
    engine = {
        "whole": {"speculative_config": json.dumps({"method": "eagle", "model": str(folder)})},
        "dotted": {"speculative_config.model": str(folder)},
        "short": {"spec_model": str(folder)},
    }[form]
    assert estimate_weight_bytes(BF16, "bfloat16", engine) == (16 + 2) * MIB
    assert estimate_weight_bytes(BF16, "float32", engine) == (32 + 4) * MIB


@pytest.mark.parametrize("method", ["mtp", "mimo_mtp"])
@pytest.mark.parametrize("form", ["whole", "dotted", "short"])
def test_a_module_in_the_models_checkpoint_counts_once(
    folder: Path, form: str, method: str
) -> None:
    path = str(folder / ".." / folder.name)
    engine = {
        "whole": {"speculative_config": json.dumps({"method": method, "model": path})},
        "dotted": {"speculative_config.method": method, "speculative_config.model": path},
        "short": {"spec_method": method, "spec_model": path},
    }[form]
    assert drafter_elements(engine, folder) == {}
    assert drafter_elements(engine, folder.parent) == {"F32": MIB}


def test_a_model_that_drafts_for_itself_counts_twice(folder: Path) -> None:
    engine = {"spec_method": "draft_model", "spec_model": str(folder)}
    assert drafter_elements(engine, folder) == {"F32": MIB}


@pytest.mark.parametrize(
    "engine",
    [
        {},
        {"speculative_config": json.dumps({"method": "ngram"})},
        {"speculative_config": json.dumps({"method": "mtp"})},
        {"speculative_config": json.dumps({"method": 7, "model": ["mtp"]})},
        {"speculative_config": json.dumps({"model": "org/drafter"})},
        {"speculative_config": "no JSON"},
        {"speculative_config": "[" * 100_000},
        {"speculative_config": "7"},
    ],
)
def test_nothing_else_counts(engine: dict[str, str]) -> None:
    assert drafter_elements(engine) == {}


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="no weights"):
        drafter_elements({"spec_model": str(tmp_path)})


@pytest.mark.parametrize(
    ("config", "degrees"),
    [
        (HEADS, [2, 4]),
        ({"text_config": HEADS, "num_attention_heads": 7}, [2, 4]),
        ({"n_head": 12, "n_embd": 768}, [2, 3, 4, 6]),
        ({"num_attention_heads": 71, "num_kv_heads": 1}, []),
        (HEADS | {"moe_intermediate_size": 6}, [2]),
        (HEADS | {"kv_lora_rank": 512, "num_key_value_heads": 5}, [2, 3, 4, 6]),
        ({"num_attention_heads": [4, 8], "n_layers": 4, "intermediate_size": True}, [*range(2, 9)]),
        ({}, [*range(2, 9)]),
    ],
)
def test_degrees_that_divide(config: dict[str, Any], degrees: list[int]) -> None:
    found = [one for one in range(2, 9) if not why_checkpoint_undivided(config, one)]
    assert found == degrees
    assert not why_checkpoint_undivided(config, 1)
