"""Makers of a tiny random checkpoint for every family of the table, through Transformers' classes.

    python -m benchmarks.families.make FOLDER [--only FAMILY ...]

The weights are random but scaled so that greedy text varies and depends on the whole prompt. Equal
arguments give equal bytes on the same machine; a checkpoint that exists is kept.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import shutil
import sys
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.families.family import HIDDEN_SIZE, Family
from benchmarks.families.table import FAMILIES, family_named
from gpupoold.checkpoints.maker import whole_folder
from gpupoold.checkpoints.tiny import DEFAULT_SIZE, Recipe
from gpupoold.checkpoints.tiny_tokenizer import write_tokenizer
from gpupoold.units import parse_size_bytes
from scripts.tiny_drafter import make_drafting
from scripts.tiny_quantized import make_quantized
from tests.support.tiny_pooling import PoolingRecipe, make_pooling_checkpoint
from tests.support.tiny_vision import VISION_FAMILIES, make_vision_checkpoint

if TYPE_CHECKING:
    import torch

TEMPLATES = Path(__file__).parents[2] / "tests" / "templates"
RECIPE_FILE = "gpupool_family.json"
_VERSION = 2

# Standard deviations in units of 1/sqrt(fan_in), as in the checkpoints of `tiny.py`.
_QUERY_KEY_GAIN = 2.0
_OUTPUT_GAIN = 2.0
_LOGIT_STD = 3.0
_BIAS_STD = 0.1
_NORM_STD = 0.1
# Of an embedding that is the output matrix too: a larger one would repeat the last token for ever.
_TIED_STD = 0.3

# Parameters whose distribution is part of the family: time steps and decays of states.
_KEPT = ("A_log", "dt_bias", "D", "inv_freq", "layer_scalar")
_EMBEDDINGS = ("embed", "wte", "wpe", "position_embedding")
_OUTPUTS = ("o_proj", "out_proj", "down_proj", "c_proj", "w2", "fc2", "dense", "Wo")
_QUERY_KEYS = ("q_proj", "k_proj", "qkv", "query", "key", "c_attn", "Wqkv", "q_b_proj")
# Families with experts as (expert, in, out); the others have (expert, out, in).
_EXPERTS_IN_OUT = ("gpt_oss", "llama4_text")


def make_family(family: Family, parent: Path) -> Path:
    """Write the checkpoint of a family below ``parent``, unless the same one is there; return the
    folder.
    """
    if family.task == "vision":
        return make_vision_checkpoint(parent, VISION_FAMILIES[family.maker])
    if family.mechanism == "quantized":
        return make_quantized(parent, family.maker, Recipe("llama", parse_size_bytes(DEFAULT_SIZE)))
    if family.drafts:
        return make_drafting(parent, family.maker)
    if family.maker:
        return make_pooling_checkpoint(parent, PoolingRecipe(family.maker))
    target = parent / family.name
    recipe = {"digest": _digest(family), "version": _VERSION}
    if _read(target / RECIPE_FILE) == recipe:
        return target
    with whole_folder(target) as folder:
        silent = _copy_tokenizer(folder)
        _write_model(family, folder, silent)
        if family.template:
            shutil.copy(TEMPLATES / f"{family.template}.jinja", folder / "chat_template.jinja")
        (folder / RECIPE_FILE).write_text(json.dumps(recipe))
    return target


def _digest(family: Family) -> str:
    text = json.dumps(asdict(family), sort_keys=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


@functools.cache
def _tokenizer() -> tuple[Path, tuple[int, ...]]:
    """Train the tokenizer once per process; return its folder and the ids without plain text."""
    folder = Path(tempfile.mkdtemp(prefix="gpupool-tokenizer-"))
    return folder, tuple(write_tokenizer(folder))


def _copy_tokenizer(folder: Path) -> Sequence[int]:
    source, silent = _tokenizer()
    shutil.copytree(source, folder, dirs_exist_ok=True)
    return silent


def _write_model(family: Family, folder: Path, silent: Sequence[int]) -> None:
    import torch
    import transformers

    torch.manual_seed(zlib.crc32(family.name.encode()))
    config = transformers.AutoConfig.for_model(family.model_type, **dict(family.config))
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    tied = bool(getattr(config.get_text_config(), "tie_word_embeddings", False))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _draw(name, parameter, family, tied=tied)
        model.get_output_embeddings().weight[list(silent)] = 0
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)


def _draw(name: str, parameter: torch.Tensor, family: Family, *, tied: bool) -> None:
    """Draw a parameter in place by its name and shape."""
    parts = name.split(".")
    owner = parts[-2] if parts[-1] in ("weight", "bias") and len(parts) > 1 else parts[-1]
    if parts[-1] in _KEPT or owner in _KEPT:
        return
    if "norm" in owner.lower() or (parameter.dim() == 1 and parts[-1] == "weight"):
        mean = float(parameter.mean()) + (owner in ("q_norm", "k_norm")) * (_QUERY_KEY_GAIN - 1)
        parameter.normal_().mul_(_NORM_STD).add_(mean)
    elif parameter.dim() == 1 or parts[-1].endswith("bias"):
        parameter.normal_().mul_(_BIAS_STD)
    elif any(part in owner for part in _EMBEDDINGS) and parts[-1] == "weight":
        parameter.normal_().mul_(_embedding_std(family) if tied else 1.0)
    elif owner == "lm_head":
        parameter.normal_().mul_(_LOGIT_STD / math.sqrt(parameter.shape[-1]))
    else:
        parameter.normal_().mul_(_gain(name) / math.sqrt(_fan_in(owner, parameter, family)))


def _embedding_std(family: Family) -> float:
    """Gemma multiplies embeddings by the square root of the width."""
    is_scaled = "gemma" in family.model_type
    return _TIED_STD / math.sqrt(HIDDEN_SIZE) if is_scaled else _TIED_STD


def _gain(name: str) -> float:
    if any(part in name for part in _OUTPUTS):
        return _OUTPUT_GAIN
    return _QUERY_KEY_GAIN if any(part in name for part in _QUERY_KEYS) else 1.0


def _fan_in(owner: str, parameter: torch.Tensor, family: Family) -> int:
    if parameter.dim() == 3 and "conv" not in owner:
        is_in_out = family.model_type in _EXPERTS_IN_OUT
        return int(parameter.shape[1 if is_in_out else 2])
    if family.model_type == "gpt2":  # its layers have (in, out)
        return int(parameter.shape[0])
    return int(math.prod(parameter.shape[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.families.make", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="*", metavar="FAMILY")
    args = parser.parse_args(argv)
    chosen = [family_named(name) for name in args.only] if args.only else FAMILIES
    for family in chosen:
        print(make_family(family, args.folder), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
