"""Tiny random checkpoints, made offline in seconds: real models for tests, demos and benchmarks.

``python -m gpupoold.checkpoints.tiny DIR`` writes four folders for any Hugging Face loader: a
Llama, a Qwen2, a Qwen3 and a mixture-of-experts Mixtral, each with a byte-level BPE tokenizer and a
chat template with tools. The weights are random but scaled so that greedy text varies, depends on
the whole prompt, and is printable.

Equal arguments on the same machine give equal bytes. Heavy modules are imported only when a
checkpoint is made.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder, write_metadata
from gpupoold.checkpoints.tiny_tokenizer import MAX_POSITION_EMBEDDINGS, VOCAB_SIZE, write_tokenizer
from gpupoold.errors import Refused, UsageError
from gpupoold.units import format_bytes, parse_size_bytes

if TYPE_CHECKING:
    import torch

    from gpupoold.latency.shape import ModelShape

HEAD_DIM = 64
NUM_EXPERTS = 4
NUM_EXPERTS_PER_TOKEN = 2
DTYPES = ("float32", "bfloat16")
DEFAULT_SIZE = "10MB"
MAX_SIZE_BYTES = 1_000_000_000
RECIPE_FILE = "gpupool_tiny.json"

_SIZE_TOLERANCE = 0.05

# Standard deviations in units of 1/sqrt(fan_in), found by experiment: sharp attention makes the
# next token depend on the whole context, so that greedy text does not soon repeat.
_QUERY_KEY_GAIN = 2.0
_OUTPUT_GAIN = 2.0
_LOGIT_STD = 3.0
_BIAS_STD = 0.1


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names and tensors of a model family."""

    key: str
    hf_class: str
    model_type: str
    grouped_query: bool = True
    qkv_bias: bool = False
    qk_norm: bool = False
    num_experts: int = 0

    @property
    def checkpoint_name(self) -> str:
        return f"tiny-{self.key}"


ARCHITECTURES = {
    arch.key: arch
    for arch in (
        Architecture("llama", "LlamaForCausalLM", "llama"),
        Architecture("qwen2", "Qwen2ForCausalLM", "qwen2", grouped_query=False, qkv_bias=True),
        Architecture("qwen3", "Qwen3ForCausalLM", "qwen3", qk_norm=True),
        Architecture("mixtral", "MixtralForCausalLM", "mixtral", num_experts=NUM_EXPERTS),
    )
}


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes that scale with the requested number of bytes."""

    num_heads: int
    num_kv_heads: int
    num_layers: int
    intermediate_size: int
    head_dim: ClassVar[int] = HEAD_DIM

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.num_heads * HEAD_DIM


@dataclass(frozen=True, slots=True)
class Recipe:
    """The inputs that determine a checkpoint's bytes, except the standard library's text."""

    arch: str
    size_bytes: int
    dtype: str = "float32"
    seed: int = 0
    version: int = 1
    num_gpus: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor of a checkpoint. ``std`` 0 means constant ``mean``."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0


def make_checkpoint(parent: Path, recipe: Recipe) -> Path:
    """Make (or keep, if present) one checkpoint below ``parent``.

    ``recipe.size_bytes`` counts the weights at float32; bfloat16 files have half the size.

    Raises:
        UsageError: the architecture or dtype is unknown, no shape is near the size, or the folder
            cannot be created.
        Refused: the target folder exists and was not made by this function.
    """
    arch = _architecture(recipe)
    shape = shape_for(arch, recipe.size_bytes, recipe.num_gpus)
    target = parent / arch.checkpoint_name
    if target.exists():
        made = _read_recipe(target)
        if made is None:
            raise Refused(f"{target} exists and is not a tiny checkpoint", "choose another folder")
        if made == asdict(recipe):
            return target
    with whole_folder(target) as folder:
        silent = write_tokenizer(folder)
        _write_weights(folder, arch, shape, recipe, silent)
        config = config_of(arch, shape, recipe.dtype, VOCAB_SIZE, MAX_POSITION_EMBEDDINGS)
        write_metadata(folder, config, RECIPE_FILE, asdict(recipe))
    return target


def shape_for(arch: Architecture, size_bytes: int, num_gpus: int = 1) -> Shape:
    """Return the best-proportioned shape within 5 % of ``size_bytes`` of float32 weights.

    The attention heads can be divided among ``num_gpus``. Raises UsageError: no shape is within 5
    %; the message gives the limits.
    """
    in_range = size_bytes <= MAX_SIZE_BYTES and num_gpus > 0
    candidates = [
        shape
        for shape in (_shapes(arch, size_bytes) if in_range else ())
        if abs(num_weight_bytes(arch, shape) / size_bytes - 1) < _SIZE_TOLERANCE
        and shape.num_kv_heads % num_gpus == 0
    ]
    if not candidates:
        least = num_weight_bytes(arch, _shape(arch, 2 * num_gpus, 2, HEAD_DIM * 2))
        among = "" if num_gpus == 1 else f" that {num_gpus} GPUs can divide"
        raise UsageError(
            f"no {arch.checkpoint_name} has about {format_bytes(size_bytes)} of weights{among}",
            f"choose between {format_bytes(least)} and {format_bytes(MAX_SIZE_BYTES)}",
        )
    return min(candidates, key=_ugliness)


def num_weight_bytes(arch: Architecture, shape: Shape) -> int:
    """Return the bytes of all weights at float32; all layers have as many."""
    one, two = (
        sum(math.prod(spec.shape) for spec in tensor_specs(arch, replace(shape, num_layers=layers)))
        for layers in (1, 2)
    )
    return 4 * (one + (shape.num_layers - 1) * (two - one))


def tensor_specs(
    arch: Architecture, shape: Shape | ModelShape, vocab_size: int = VOCAB_SIZE
) -> Iterator[TensorSpec]:
    """Yield every tensor of the checkpoint with its Hugging Face name, in a fixed order."""
    hidden = shape.hidden_size
    yield TensorSpec("model.embed_tokens.weight", (vocab_size, hidden), std=1.0)
    for index in range(shape.num_layers):
        prefix = f"model.layers.{index}."
        yield _norm(prefix + "input_layernorm", hidden)
        yield from _attention_specs(arch, shape, prefix + "self_attn.")
        yield _norm(prefix + "post_attention_layernorm", hidden)
        yield from _mlp_specs(arch, shape, prefix)
    yield _norm("model.norm", hidden)
    yield _linear("lm_head", hidden, vocab_size, _LOGIT_STD)


def _attention_specs(
    arch: Architecture, shape: Shape | ModelShape, prefix: str
) -> Iterator[TensorSpec]:
    hidden, q_width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv_width = shape.num_kv_heads * shape.head_dim
    # A q/k norm removes any scale of the projections, so the norm has the gain.
    gain = 1.0 if arch.qk_norm else _QUERY_KEY_GAIN
    for name, width, std in (("q", q_width, gain), ("k", kv_width, gain), ("v", kv_width, 1.0)):
        yield _linear(f"{prefix}{name}_proj", hidden, width, std)
        if arch.qkv_bias:
            yield TensorSpec(f"{prefix}{name}_proj.bias", (width,), std=_BIAS_STD)
    if arch.qk_norm:
        yield _norm(prefix + "q_norm", shape.head_dim, mean=_QUERY_KEY_GAIN)
        yield _norm(prefix + "k_norm", shape.head_dim, mean=_QUERY_KEY_GAIN)
    yield _linear(prefix + "o_proj", q_width, hidden, _OUTPUT_GAIN)


def _mlp_specs(arch: Architecture, shape: Shape | ModelShape, prefix: str) -> Iterator[TensorSpec]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    if not arch.num_experts:
        yield _linear(prefix + "mlp.gate_proj", hidden, inner, 1.0)
        yield _linear(prefix + "mlp.up_proj", hidden, inner, 1.0)
        yield _linear(prefix + "mlp.down_proj", inner, hidden, _OUTPUT_GAIN)
        return
    prefix += "block_sparse_moe."
    yield _linear(prefix + "gate", hidden, arch.num_experts, 1.0)
    for expert in range(arch.num_experts):
        yield _linear(f"{prefix}experts.{expert}.w1", hidden, inner, 1.0)
        yield _linear(f"{prefix}experts.{expert}.w3", hidden, inner, 1.0)
        yield _linear(f"{prefix}experts.{expert}.w2", inner, hidden, _OUTPUT_GAIN)


def _linear(name: str, num_in: int, num_out: int, gain: float) -> TensorSpec:
    return TensorSpec(name + ".weight", (num_out, num_in), std=gain / math.sqrt(num_in))


def _norm(name: str, width: int, mean: float = 1.0) -> TensorSpec:
    return TensorSpec(name + ".weight", (width,), std=0.1, mean=mean)


def _shape(arch: Architecture, num_heads: int, num_layers: int, width: int) -> Shape:
    return Shape(num_heads, num_heads // (2 if arch.grouped_query else 1), num_layers, width)


def _shapes(arch: Architecture, size_bytes: int) -> Iterator[Shape]:
    """Yield, for each width and depth, the shape with the MLP width nearest to ``size_bytes``."""
    for num_heads in range(2, 33, 2):
        for num_layers in range(2, 33):
            least = _shape(arch, num_heads, num_layers, HEAD_DIM)
            base = num_weight_bytes(arch, least)
            if base > size_bytes:
                break
            step = num_weight_bytes(arch, replace(least, intermediate_size=2 * HEAD_DIM)) - base
            width = HEAD_DIM * (1 + round((size_bytes - base) / step))
            yield replace(least, intermediate_size=width)


def _ugliness(shape: Shape) -> float:
    """Return the deviation from an MLP of 3 times the width and one layer per head."""
    mlp = math.log2(shape.intermediate_size / (3 * shape.hidden_size))
    depth = math.log2(shape.num_layers / shape.num_heads)
    return 2 * abs(mlp) + abs(depth)


def _architecture(recipe: Recipe) -> Architecture:
    if recipe.arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise UsageError(f"unknown architecture {recipe.arch!r}", f"use {known} or all")
    if recipe.dtype not in DTYPES:
        raise UsageError(f"unknown dtype {recipe.dtype!r}", f"use {' or '.join(DTYPES)}")
    return ARCHITECTURES[recipe.arch]


def _read_recipe(folder: Path) -> dict[str, Any] | None:
    try:
        recipe: dict[str, Any] = json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None
    return recipe


def config_of(
    arch: Architecture, shape: Shape | ModelShape, dtype: str, vocab_size: int, max_positions: int
) -> dict[str, Any]:
    config = {
        "architectures": [arch.hf_class],
        "model_type": arch.model_type,
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": max_positions,
        "dtype": dtype,
    }
    if arch.num_experts:
        config["num_local_experts"] = arch.num_experts
        config["num_experts_per_tok"] = NUM_EXPERTS_PER_TOKEN
        config["sliding_window"] = None
    return config


def _write_weights(
    folder: Path, arch: Architecture, shape: Shape, recipe: Recipe, silent_ids: Sequence[int]
) -> None:
    """Draw the weights; the output rows of ``silent_ids`` are 0, so greedy text avoids the ids."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(recipe.seed + zlib.crc32(arch.key.encode()))
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[recipe.dtype]
    tensors: dict[str, torch.Tensor] = {}
    for spec in tensor_specs(arch, shape):
        tensor = torch.randn(spec.shape, generator=generator).mul_(spec.std).add_(spec.mean)
        if spec.name == "lm_head.weight":
            tensor[list(silent_ids)] = 0
        tensors[spec.name] = tensor.to(dtype)
    path = folder / "model.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files readable only by the owner


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per checkpoint, errors to stderr; return the exit code."""
    parser = maker_parser("gpupoold.checkpoints.tiny", "Make tiny random checkpoints, offline.")
    parser.add_argument("--arch", default="all", help=f"{', '.join(ARCHITECTURES)} or all")
    parser.add_argument("--size", default=DEFAULT_SIZE, help="bytes of weights at float32")
    parser.add_argument("--dtype", default="float32", help=" or ".join(DTYPES))
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights")
    parser.add_argument("--gpus", type=int, default=1, help="size of a group that can divide it")
    args = parser.parse_args(argv)
    made = (make_checkpoint(args.dir, recipe) for recipe in _recipes(args))
    return print_made(made, lambda file: file.st_size, as_json=args.json)


def _recipes(args: argparse.Namespace) -> Iterator[Recipe]:
    try:
        size_bytes = parse_size_bytes(args.size)
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None
    names = list(ARCHITECTURES) if args.arch == "all" else [args.arch]
    for name in names:
        yield Recipe(name, size_bytes, args.dtype, args.seed, num_gpus=args.gpus)


if __name__ == "__main__":
    sys.exit(main())
