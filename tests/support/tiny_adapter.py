"""Tiny random LoRA adapters in the format of peft, made offline for tests and demos.

``python -m tests.support.tiny_adapter DIR --base CHECKPOINT`` writes one adapter for the
checkpoint's linear layers. The weights are large enough that greedy text differs from the base's.
"""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupoold.checkpoints.files import TensorEntry, read_tensors
from gpupoold.checkpoints.layout import ADAPTER_CONFIG_FILE, ADAPTER_WEIGHTS_FILE
from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder
from gpupoold.errors import Refused, UsageError

if TYPE_CHECKING:
    import torch

DEFAULT_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RECIPE_FILE = "gpupool_tiny_adapter.json"

_GAIN = 0.5
_WEIGHT = ".weight"


@dataclass(frozen=True, slots=True)
class AdapterRecipe:
    """The inputs that determine an adapter's bytes, with the base's shapes."""

    name: str
    rank: int = 8
    modules: tuple[str, ...] = DEFAULT_MODULES
    dtype: str = "float32"
    seed: int = 0


def make_adapter(parent: Path, base: Path, recipe: AdapterRecipe) -> Path:
    """Make one adapter of the checkpoint ``base`` below ``parent``; replace an earlier one.

    Raises:
        UsageError: the rank is below 1, or the base has none of the modules.
        Refused: the base's weights cannot be read, or the target is not a tiny adapter.
    """
    if recipe.rank < 1:
        raise UsageError(f"rank {recipe.rank} is not a positive number", "use a rank such as 8")
    target = parent / recipe.name
    if target.exists() and not (target / RECIPE_FILE).is_file():
        raise Refused(f"{target} exists and is not a tiny adapter", "choose another folder")
    layers = [
        tensor
        for file in sorted(base.glob("*.safetensors"))
        for tensor in read_tensors(file)
        if len(tensor.shape) == 2 and _module(tensor) in recipe.modules
    ]
    if not layers:
        wanted = ", ".join(recipe.modules)
        raise UsageError(f"{base} has no weights of {wanted}", "name other modules")
    with whole_folder(target) as folder:
        _write_weights(folder, layers, recipe)
        config = _config(base, recipe)
        for name, content in ((ADAPTER_CONFIG_FILE, config), (RECIPE_FILE, asdict(recipe))):
            (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return target


def _module(tensor: TensorEntry) -> str:
    return tensor.name.removesuffix(_WEIGHT).rpartition(".")[2]


def _config(base: Path, recipe: AdapterRecipe) -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": recipe.rank,
        "lora_alpha": 2 * recipe.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(recipe.modules),
        "inference_mode": True,
    }


def _write_weights(folder: Path, layers: Sequence[TensorEntry], recipe: AdapterRecipe) -> None:
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(recipe.seed + zlib.crc32(recipe.name.encode()))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    tensors: dict[str, torch.Tensor] = {}
    for layer in layers:
        num_out, num_in = layer.shape
        prefix = f"base_model.model.{layer.name.removesuffix(_WEIGHT)}"
        for part, shape, std in (
            ("lora_A", (recipe.rank, num_in), 1 / math.sqrt(num_in)),
            ("lora_B", (num_out, recipe.rank), _GAIN / math.sqrt(recipe.rank)),
        ):
            values = torch.randn(shape, generator=generator).mul_(std)
            tensors[f"{prefix}.{part}.weight"] = values.to(dtype)
    path = folder / ADAPTER_WEIGHTS_FILE
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files readable only by the owner


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: print the adapter's folder, errors to stderr; return the exit code."""
    parser = maker_parser("tests.support.tiny_adapter", "Make a tiny random LoRA adapter.")
    parser.add_argument("--base", type=Path, required=True, help="folder of the base's checkpoint")
    parser.add_argument("--name", default="tiny-adapter", help="name of the adapter's folder")
    parser.add_argument("--rank", type=int, default=8, help="rank of every layer")
    parser.add_argument("--modules", default=",".join(DEFAULT_MODULES), help="target modules")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    args = parser.parse_args(argv)
    modules = tuple(args.modules.split(","))
    recipe = AdapterRecipe(args.name, args.rank, modules, args.dtype, args.seed)
    made = (make_adapter(args.dir, args.base, recipe) for _ in range(1))
    return print_made(made, lambda file: file.st_size, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
