"""Checkpoints of real dimensions without weights, made offline in a moment.

``python -m gpupoold.checkpoints.dummy DIR --shape Qwen2.5-7B`` writes a folder that reads like the
real checkpoint: its ``config.json``, a small tokenizer, and a weight file with a complete header
and a hole as data, which takes no disk. Devices without an engine serve such a checkpoint; an
engine would read zeros.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder, write_metadata
from gpupoold.checkpoints.tiny_tokenizer import write_tokenizer
from gpupoold.errors import Refused, UsageError
from gpupoold.latency.shape import LatencyError, ModelShape, builtin_shape

DEFAULT_SHAPE = "Qwen2.5-7B"
RECIPE_FILE = "gpupool_dummy.json"
MAX_POSITION_EMBEDDINGS = 32768

_WEIGHT_FILE = "model.safetensors"
_DTYPE = "bfloat16"


class _Family(NamedTuple):
    hf_class: str
    model_type: str
    qkv_bias: bool


_LLAMA = _Family("LlamaForCausalLM", "llama", qkv_bias=False)
_QWEN2 = _Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True)


class DummyTensor(NamedTuple):
    """A tensor of the checkpoint with its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


def make_dummy_checkpoint(parent: Path, shape_name: str) -> Path:
    """Make (or keep, if present) ``parent/dummy-weights-SHAPE``.

    ``shape_name`` is a key of ``latency/shapes.toml``. Families with custom code on the Hugging
    Face hub are written as Llamas of the same dimensions.

    Raises:
        UsageError: the shape is unknown, or the folder cannot be made.
        Refused: the folder exists and was not made by this function.
    """
    try:
        shape = builtin_shape(shape_name)
    except LatencyError as error:
        raise UsageError(str(error)) from error
    target = parent / f"dummy-weights-{shape_name.lower()}"
    if target.exists():
        if not (target / RECIPE_FILE).exists():
            raise Refused(
                f"{target} exists and is not a dummy-weights checkpoint", "choose another folder"
            )
        return target
    with whole_folder(target) as folder:
        _write(folder, shape_name, shape)
    return target


def tensors_of(shape: ModelShape, *, qkv_bias: bool) -> list[DummyTensor]:
    """Return all tensors, with exactly ``shape.num_parameters`` elements in total.

    Raises UsageError: no vocabulary size gives that number of elements.
    """
    layers = [tensor for i in range(shape.num_layers) for tensor in _layer(shape, i, qkv_bias)]
    inner = [*layers, DummyTensor("model.norm.weight", (shape.hidden_size,))]
    left = shape.num_parameters - sum(math.prod(tensor.shape) for tensor in inner)
    vocab_size, over = divmod(left, 2 * shape.hidden_size)
    if over or vocab_size <= 0:
        raise UsageError(f"no vocabulary size gives {shape.num_parameters} parameters for {shape}")
    table = (vocab_size, shape.hidden_size)
    return [
        DummyTensor("model.embed_tokens.weight", table),
        *inner,
        DummyTensor("lm_head.weight", table),
    ]


def _layer(shape: ModelShape, index: int, qkv_bias: bool) -> Iterator[DummyTensor]:
    prefix, hidden = f"model.layers.{index}.", shape.hidden_size
    widths = {
        "q": shape.num_heads * shape.head_dim,
        "k": shape.num_kv_heads * shape.head_dim,
        "v": shape.num_kv_heads * shape.head_dim,
    }
    for name, width in widths.items():
        yield DummyTensor(f"{prefix}self_attn.{name}_proj.weight", (width, hidden))
        if qkv_bias:
            yield DummyTensor(f"{prefix}self_attn.{name}_proj.bias", (width,))
    yield DummyTensor(f"{prefix}self_attn.o_proj.weight", (hidden, widths["q"]))
    for name in ("gate", "up"):
        yield DummyTensor(f"{prefix}mlp.{name}_proj.weight", (shape.intermediate_size, hidden))
    yield DummyTensor(f"{prefix}mlp.down_proj.weight", (hidden, shape.intermediate_size))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield DummyTensor(f"{prefix}{name}.weight", (hidden,))


def _write(folder: Path, shape_name: str, shape: ModelShape) -> None:
    family = _QWEN2 if shape_name.startswith("Qwen") else _LLAMA
    tensors = tensors_of(shape, qkv_bias=family.qkv_bias)
    write_tokenizer(folder)
    _write_hole(folder / _WEIGHT_FILE, tensors)
    config = _config(family, shape, tensors[0].shape[0])
    write_metadata(folder, config, RECIPE_FILE, {"shape": shape_name})


def _write_hole(path: Path, tensors: Sequence[DummyTensor]) -> None:
    """Write a safetensors file whose data is a hole, read as zeros."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + 2 * math.prod(tensor.shape)
        entry = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": (begin, end)}
        header[tensor.name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def _config(family: _Family, shape: ModelShape, vocab_size: int) -> dict[str, Any]:
    return {
        "architectures": [family.hf_class],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "dtype": _DTYPE,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line per checkpoint, errors to stderr; return the exit code."""
    parser = maker_parser("gpupoold.checkpoints.dummy", "Make checkpoints without weights.")
    parser.add_argument("--shape", action="append", help="a model of latency/shapes.toml")
    args = parser.parse_args(argv)
    made = (make_dummy_checkpoint(args.dir, name) for name in args.shape or [DEFAULT_SHAPE])
    # Bytes that a file takes on disk, where holes take no space.
    return print_made(made, lambda file: file.st_blocks * 512, as_json=args.json)


if __name__ == "__main__":
    sys.exit(main())
