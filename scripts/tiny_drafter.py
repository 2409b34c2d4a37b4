"""A tiny model for speculative decoding, and its EAGLE drafter, made offline.

    python -m scripts.tiny_drafter DIR      # tiny-llama-calm and tiny-llama-calm-eagle

In the calm model attention and MLP change the residual stream little, so the next token depends
mostly on the last token: the text soon repeats, which n-gram drafts find, and the drafter can guess
the next token from the embedding alone. Both guess wrong often enough to test rejections.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from gpupoold.checkpoints.maker import whole_folder
from gpupoold.checkpoints.tiny import DEFAULT_SIZE, RECIPE_FILE, Recipe, make_checkpoint
from gpupoold.units import parse_size_bytes

_CALM_GAIN = 0.12
_WEIGHTS = "model.safetensors"


def make_calm(parent: Path) -> Path:
    """Make a tiny Llama whose attention and MLP have little effect."""
    source = make_checkpoint(parent, Recipe("llama", parse_size_bytes(DEFAULT_SIZE)))
    target = parent / f"{source.name}-calm"
    with whole_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / RECIPE_FILE).unlink()
        tensors = load_file(folder / _WEIGHTS)
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor *= _CALM_GAIN
        save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    return target


def make_eagle(calm: Path) -> Path:
    """Make an EAGLE drafter of one layer for a calm model; embeddings and head are the model's.

    The projection takes the embedding and ignores the hidden state.
    """
    target = calm.parent / f"{calm.name}-eagle"
    tensors = load_file(calm / _WEIGHTS)
    config: dict[str, Any] = json.loads((calm / "config.json").read_text())
    prefix, hidden = "model.layers.0.", config["hidden_size"]
    drafter = {
        name.removeprefix("model."): tensor
        for name, tensor in tensors.items()
        if name.startswith(prefix) and "input_layernorm" not in name
    }
    final_norm = torch.diag(tensors["model.norm.weight"].float())
    drafter["fc.weight"] = torch.cat([final_norm, torch.zeros(hidden, hidden)], 1)
    with whole_folder(target) as folder:
        save_file(drafter, folder / _WEIGHTS, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}, indent=2))
    return target


def main() -> int:
    """Make both checkpoints below the folder in the command line, and print their paths."""
    calm = make_calm(Path(sys.argv[1]))
    print(calm, make_eagle(calm), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
