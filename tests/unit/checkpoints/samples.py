"""Small real checkpoints, written with the safetensors library."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "float16",
    "max_position_embeddings": 2048,
}
NUM_ELEMENTS = 64 * 32 + 16


def weights(prefix: str = "model", dtype: str = "float16") -> bytes:
    """A safetensors file of two tensors with ``NUM_ELEMENTS`` elements."""
    return save(
        {
            f"{prefix}.embed.weight": np.arange(64 * 32, dtype=dtype).reshape(64, 32),
            f"{prefix}.norm.weight": np.ones(16, dtype=dtype),
        }
    )


def checkpoint(**config: Any) -> dict[str, bytes]:
    """File name → content of a complete single-file checkpoint."""
    return {
        "config.json": json.dumps(CONFIG | config).encode(),
        "tokenizer.json": b"{}",
        "tokenizer_config.json": b"{}",
        "model.safetensors": weights(),
    }


def sharded() -> dict[str, bytes]:
    """The same in two shards with an index."""
    files = checkpoint()
    del files["model.safetensors"]
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files[names[0]], files[names[1]] = weights("a"), weights("b")
    weight_map = {
        f"{prefix}.{tensor}.weight": name
        for prefix, name in zip("ab", names, strict=True)
        for tensor in ("embed", "norm")
    }
    files["model.safetensors.index.json"] = json.dumps({"weight_map": weight_map}).encode()
    return files


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Put the files into ``folder`` and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def both() -> bytes:
    """A shard that has the tensors of both shards of :func:`sharded`, as re-used shards have."""
    ones = {
        f"{prefix}.{name}.weight": np.ones(shape, "float16")
        for prefix in "ab"
        for name, shape in (("embed", (64, 32)), ("norm", (16,)))
    }
    return save(ones)
