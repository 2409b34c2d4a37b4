"""Checkpoints of real dimensions with no weights in them, made offline in a moment.

``python -m gpupoold.checkpoints.hollow DIR --shape Qwen2.5-7B`` writes a folder that
reads like the real checkpoint: its ``config.json``, a small tokenizer, and a weight file
whose header is complete and whose data is a hole, which takes no disk. Devices without
an engine serve it; an engine would read zeros.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gpupoold.checkpoints.tiny_tokenizer import EOS_ID, PAD_ID, write_tokenizer
from gpupoold.errors import GpupoolError, Refused, UsageError
from gpupoold.latency.errors import LatencyError
from gpupoold.latency.shape import ModelShape, builtin_shape

DEFAULT_SHAPE = "Qwen2.5-7B"
RECIPE_FILE = "gpupool_hollow.json"
MAX_POSITION_EMBEDDINGS = 32768

_WEIGHT_FILE = "model.safetensors"
_DTYPE = "bfloat16"


class _Family(NamedTuple):
    hf_class: str
    model_type: str
    qkv_bias: bool


_LLAMA = _Family("LlamaForCausalLM", "llama", qkv_bias=False)
_QWEN2 = _Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True)


class Tensor(NamedTuple):
    """A tensor of the checkpoint under its Hugging Face name."""

    name: str
    shape: tuple[int, ...]


def make_hollow_checkpoint(parent: Path, shape_name: str) -> Path:
    """Make (or keep, if it is there already) ``parent/hollow-SHAPE``.

    ``shape_name`` is one of ``latency/shapes.toml``. Families with code of their own on the
    Hugging Face hub are written as Llamas of the same dimensions.

    Raises:
        UsageError: nothing is known of that shape.
        Refused: the folder exists and was not made by this program.
    """
    try:
        shape = builtin_shape(shape_name)
    except LatencyError as error:
        raise UsageError(str(error)) from error
    target = parent / f"hollow-{shape_name.lower()}"
    if target.exists():
        if not (target / RECIPE_FILE).exists():
            raise Refused(f"{target} exists and is no hollow checkpoint", "choose another folder")
        return target
    scratch = parent / f".{target.name}.{os.getpid()}"
    scratch.mkdir(parents=True)
    try:
        _write(scratch, shape_name, shape)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def tensors_of(shape: ModelShape, *, qkv_bias: bool) -> list[Tensor]:
    """All tensors; together they have exactly ``shape.num_parameters`` elements.

    Raises:
        UsageError: no size of vocabulary makes up that number.
    """
    layers = [tensor for i in range(shape.num_layers) for tensor in _layer(shape, i, qkv_bias)]
    inner = [*layers, Tensor("model.norm.weight", (shape.hidden_size,))]
    left = shape.num_parameters - sum(math.prod(tensor.shape) for tensor in inner)
    vocab_size, over = divmod(left, 2 * shape.hidden_size)
    if over or vocab_size <= 0:
        raise UsageError(f"the parameters of {shape} do not add up")
    table = (vocab_size, shape.hidden_size)
    return [Tensor("model.embed_tokens.weight", table), *inner, Tensor("lm_head.weight", table)]


def _layer(shape: ModelShape, index: int, qkv_bias: bool) -> Iterator[Tensor]:
    prefix, hidden = f"model.layers.{index}.", shape.hidden_size
    widths = {
        "q": shape.num_heads * shape.head_dim,
        "k": shape.num_kv_heads * shape.head_dim,
        "v": shape.num_kv_heads * shape.head_dim,
    }
    for name, width in widths.items():
        yield Tensor(f"{prefix}self_attn.{name}_proj.weight", (width, hidden))
        if qkv_bias:
            yield Tensor(f"{prefix}self_attn.{name}_proj.bias", (width,))
    yield Tensor(f"{prefix}self_attn.o_proj.weight", (hidden, widths["q"]))
    for name in ("gate", "up"):
        yield Tensor(f"{prefix}mlp.{name}_proj.weight", (shape.intermediate_size, hidden))
    yield Tensor(f"{prefix}mlp.down_proj.weight", (hidden, shape.intermediate_size))
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield Tensor(f"{prefix}{name}.weight", (hidden,))


def _family(shape_name: str) -> _Family:
    return _QWEN2 if shape_name.startswith("Qwen") else _LLAMA


def _write(folder: Path, shape_name: str, shape: ModelShape) -> None:
    family = _family(shape_name)
    tensors = tensors_of(shape, qkv_bias=family.qkv_bias)
    write_tokenizer(folder)
    _write_hole(folder / _WEIGHT_FILE, tensors)
    _write_json(folder / "config.json", _config(family, shape, tensors[0].shape[0]))
    ends = {"eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    _write_json(folder / "generation_config.json", ends)
    _write_json(folder / RECIPE_FILE, {"shape": shape_name})


def _write_hole(path: Path, tensors: Sequence[Tensor]) -> None:
    """A safetensors file whose data was never written: it reads as zeros."""
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
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "dtype": _DTYPE,
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpupoold.checkpoints.hollow", description="Make checkpoints without weights, offline."
    )
    parser.add_argument("dir", type=Path, help="folder below which the checkpoints are made")
    parser.add_argument("--shape", action="append", help="a model of latency/shapes.toml")
    parser.add_argument("--json", action="store_true", help="one JSON object per line")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; prints one line per checkpoint, errors to stderr, returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        for name in args.shape or [DEFAULT_SHAPE]:
            path = make_hollow_checkpoint(args.dir, name).resolve()
            print(json.dumps(_summary(path)) if args.json else path, flush=True)
    except GpupoolError as error:
        fields = {"code": error.code, "message": error.message, "hint": error.hint}
        print(json.dumps(fields) if args.json else error, file=sys.stderr)
        return error.exit_code
    return 0


def _summary(path: Path) -> dict[str, Any]:
    """``size_bytes`` is what the files take on disk."""
    size_bytes = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    return {"name": path.name, "path": str(path), "size_bytes": size_bytes}


if __name__ == "__main__":
    sys.exit(main())
