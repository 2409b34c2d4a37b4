"""Tiny models for speculative decoding, and their drafters, made offline.

    python -m scripts.tiny_drafter DIR

===========================  ==================================================================
tiny-llama-calm              a Llama
tiny-llama-calm-eagle        its EAGLE head
tiny-qwen2-calm              a Qwen2
tiny-qwen2-calm-eagle3       its EAGLE-3 head, with a smaller vocabulary for drafts
tiny-mimo-calm               the Qwen2 as MiMo, whose checkpoint has a module for MTP
===========================  ==================================================================

In a calm model attention and MLP change the residual stream little, so the next token depends
mostly on the last token: the text soon repeats, which n-gram drafts find, and a drafter can guess
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
_FIRST_LAYER = "model.layers.0."
_AUX_STATES = [0, 1, 2]  # before the first layer, and after each of two layers
_STATE_GAIN = 0.05
_UNDRAFTED = 4
"""Each token id that this number divides is missing in EAGLE-3's vocabulary."""

Tensors = dict[str, torch.Tensor]


def make_calm(parent: Path, arch: str = "llama") -> Path:
    """Make a tiny model whose attention and MLP have little effect."""
    source = make_checkpoint(parent, Recipe(arch, parse_size_bytes(DEFAULT_SIZE)))
    tensors, config = _read(source)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= _CALM_GAIN
    return _write_beside(source, f"{source.name}-calm", tensors, config)


def make_eagle(calm: Path) -> Path:
    """Make an EAGLE drafter of one layer for a calm model; embeddings and head are the model's.

    The projection takes the embedding and ignores the hidden state.
    """
    tensors, config = _read(calm)
    hidden = config["hidden_size"]
    drafter = {
        name.removeprefix("model."): tensor
        for name, tensor in _first_layer(tensors).items()
        if "input_layernorm" not in name
    }
    final_norm = torch.diag(tensors["model.norm.weight"].float())
    drafter["fc.weight"] = torch.cat([final_norm, torch.zeros(hidden, hidden)], 1)
    return _write_drafter(calm, "eagle", drafter, config)


def make_eagle3(calm: Path) -> Path:
    """Make an EAGLE-3 head for a calm model without grouped queries; the embeddings are the
    model's.

    Attention passes the embedding on: a position finds itself and equal tokens. The auxiliary
    hidden states have a small weight.
    """
    tensors, config = _read(calm)
    hidden = config["hidden_size"]
    identity, nothing = torch.eye(hidden), torch.zeros(hidden, hidden)
    layer = {
        name.removeprefix(_FIRST_LAYER): tensor
        for name, tensor in _first_layer(tensors).items()
        if not name.endswith(".bias")
    }
    for name, gain in (("q", 2.0), ("k", 2.0), ("v", 1.0)):
        layer[f"self_attn.{name}_proj.weight"] = torch.cat([gain * identity, nothing], 1)
    layer["self_attn.o_proj.weight"] = identity.clone()
    layer["input_layernorm.weight"] = torch.ones(hidden)
    layer["hidden_norm.weight"] = torch.full((hidden,), _STATE_GAIN)
    drafter = {f"midlayer.{name}": tensor for name, tensor in layer.items()}
    drafter["fc.weight"] = torch.cat([identity] * len(_AUX_STATES), 1)
    drafter["norm.weight"] = tensors["model.norm.weight"]
    vocabulary = torch.arange(config["vocab_size"])
    is_drafted = vocabulary % _UNDRAFTED != 0
    drafted = vocabulary[is_drafted]
    drafter["lm_head.weight"] = tensors["lm_head.weight"][drafted]
    drafter["d2t"] = drafted - torch.arange(len(drafted))
    drafter["t2d"] = is_drafted
    changes: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": len(drafted),
        "norm_before_residual": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": _AUX_STATES},
    }
    return _write_drafter(calm, "eagle3", drafter, config | changes)


def make_mtp(calm: Path) -> Path:
    """Make a MiMo of a calm Qwen2, with a module for MTP of one layer in the same checkpoint.

    The module takes the embedding, and a little of the hidden state. Published MiMo checkpoints
    have configuration code of their own; this one has Qwen2's, which has the same fields.
    """
    tensors, config = _read(calm)
    hidden = config["hidden_size"]
    prefix = "model.mtp_layers.0."
    module = {
        prefix + name.removeprefix(_FIRST_LAYER): tensor.clone()
        for name, tensor in _first_layer(tensors).items()
    }
    identity = torch.eye(hidden)
    module[prefix + "input_proj.weight"] = torch.cat([_STATE_GAIN * identity, identity], 1)
    for name in ("token_layernorm", "hidden_layernorm"):
        module[f"{prefix}{name}.weight"] = torch.ones(hidden)
    module[f"{prefix}final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    changes: dict[str, Any] = {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
    return _write_beside(calm, "tiny-mimo-calm", tensors | module, config | changes)


def _read(folder: Path) -> tuple[Tensors, dict[str, Any]]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return load_file(folder / _WEIGHTS), config


def _first_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(_FIRST_LAYER)}


def _write_beside(source: Path, name: str, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Write a model with the tokenizer of ``source``."""
    target = source.parent / name
    with whole_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / RECIPE_FILE).unlink(missing_ok=True)
        _write(folder, tensors, config)
    return target


def _write_drafter(calm: Path, kind: str, tensors: Tensors, config: dict[str, Any]) -> Path:
    target = calm.parent / f"{calm.name}-{kind}"
    with whole_folder(target) as folder:
        _write(folder, tensors, config | {"num_hidden_layers": 1})
    return target


def _write(folder: Path, tensors: Tensors, config: dict[str, Any]) -> None:
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2))


def make_all(parent: Path) -> list[Path]:
    """Make all checkpoints below a folder."""
    llama, qwen2 = make_calm(parent), make_calm(parent, "qwen2")
    return [llama, make_eagle(llama), qwen2, make_eagle3(qwen2), make_mtp(qwen2)]


def make_drafting(parent: Path, name: str) -> Path:
    """Return a model of ``make_all`` by name; all are made, unless this one is there."""
    if not (parent / name).exists():
        make_all(parent)
    return parent / name


def main() -> int:
    """Make all checkpoints below the folder in the command line, and print their paths."""
    print(*make_all(Path(sys.argv[1])), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
