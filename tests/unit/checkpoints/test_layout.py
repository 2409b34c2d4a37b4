"""Repositories of other programs: a reason and a remedy, before anything large is fetched."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from gpupoold.checkpoints.check import check_checkpoint
from gpupoold.checkpoints.layout import UNREAD_QUANTIZATION
from gpupoold.errors import Refused
from tests.unit.checkpoints import samples
from tests.unit.checkpoints.download_tools import download
from tests.unit.checkpoints.fake_hub import FakeHub

REPO = "org/model"
LISTINGS: dict[str, tuple[tuple[str, ...], str, str]] = {
    "gguf": (("README.md", "config.json", "m-Q4_K_M.gguf"), "GGUF", "original model's repository"),
    "gguf in folders": (("Q4/m-1-of-2.gguf", "Q4/m-2-of-2.gguf"), "GGUF", "AWQ"),
    "onnx": (("config.json", "onnx/model.onnx", "tokenizer.json"), "ONNX", "original"),
    "adapter": (("adapter_config.json", "adapter_model.safetensors"), "LoRA", "add-adapter"),
    "diffusers": (
        ("model_index.json", "unet/diffusion_pytorch_model.safetensors", "vae/config.json"),
        "Diffusers",
        "only language models",
    ),
    "flux": (("model_index.json", "flux1-dev.safetensors"), "Diffusers", "language models"),
    "flax": (("config.json", "flax_model.msgpack", "tokenizer.json"), "Flax", "original"),
    "tensorflow": (("config.json", "tf_model.h5"), "TensorFlow", "original"),
    "nemo": (("model.nemo",), "NeMo", "original"),
    "tensorrt": (("config.json", "rank0.engine"), "TensorRT", "original"),
    "core ml": (("m.mlpackage/Data/weights/weight.bin",), "Core ML", "original"),
    "litert": (("gemma.litertlm", "gemma.task"), "LiteRT", "original"),
}


@pytest.mark.parametrize("name", LISTINGS)
def test_on_the_hub(name: str, hub: FakeHub, tmp_path: Path) -> None:
    paths, what, remedy = LISTINGS[name]
    hub.add(REPO, dict.fromkeys(paths, b"{}"))
    with pytest.raises(Refused) as caught:
        asyncio.run(download(REPO, None, tmp_path / "m", lambda *_: None, part="small files"))
    assert caught.value.message.startswith(f"{REPO} ")
    assert what in caught.value.message
    assert remedy in caught.value.hint
    assert not [one for one in hub.requests if "/resolve/" in one.path]


# Of a folder only the top is read.
IN_FOLDERS = [name for name in LISTINGS if name not in ("gguf in folders", "onnx")]


@pytest.mark.parametrize("name", IN_FOLDERS)
def test_in_a_folder(name: str, tmp_path: Path) -> None:
    paths, what, remedy = LISTINGS[name]
    config = json.dumps(samples.CONFIG).encode()
    for path in (*paths, "tokenizer.json"):
        (tmp_path / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / path).write_bytes(config)
    with pytest.raises(Refused) as caught:
        check_checkpoint(tmp_path, allow_pickle=False, allow_remote_code=False)
    assert what in caught.value.message
    assert str(tmp_path) in caught.value.message
    assert remedy in caught.value.hint


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]}, "T5"),
        ({"is_encoder_decoder": True, "model_type": "whisper"}, "encoder-decoder"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes'"),
        ({"quantization_config": {"quant_method": "EXL2", "bits": 4}}, "'exl2'"),
        ({"text_config": {"quantization_config": {"quant_method": "hqq"}}}, "'hqq'"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "MLX"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, "MLX"),
    ],
)
def test_kinds_that_are_never_served(
    config: dict[str, Any], reason: str, hub: FakeHub, tmp_path: Path
) -> None:
    hub.add(REPO, samples.checkpoint(**config))
    with pytest.raises(Refused) as caught:
        asyncio.run(download(REPO, None, tmp_path / "m", lambda *_: None))
    assert reason in caught.value.message
    assert "config.json" in caught.value.message
    assert caught.value.hint
    assert not hub.downloads("model.safetensors")


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 128}},
        {"quantization_config": {"quant_method": "compressed-tensors"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": None, "quantization": "none", "is_encoder_decoder": False},
    ],
)
def test_kinds_that_may_be_served(config: dict[str, Any], tmp_path: Path) -> None:
    samples.write(tmp_path, samples.checkpoint(**config))
    check_checkpoint(tmp_path, allow_pickle=False, allow_remote_code=False)


def test_vllm_has_none_of_the_refused_methods() -> None:
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    assert not UNREAD_QUANTIZATION & set(QUANTIZATION_METHODS)
