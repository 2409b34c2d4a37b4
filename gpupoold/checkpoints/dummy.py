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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpupoold.checkpoints import tiny
from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder, write_metadata
from gpupoold.checkpoints.tiny_tokenizer import write_tokenizer
from gpupoold.errors import Refused, UsageError
from gpupoold.latency.shape import LatencyError, ModelShape, builtin_shape

DEFAULT_SHAPE = "Qwen2.5-7B"
RECIPE_FILE = "gpupool_dummy.json"
MAX_POSITION_EMBEDDINGS = 32768

_WEIGHT_FILE = "model.safetensors"
_DTYPE = "bfloat16"


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
    arch = tiny.ARCHITECTURES["qwen2" if shape_name.startswith("Qwen") else "llama"]
    tensors = tensors_of(arch, shape)
    vocab_size = tensors[0].shape[0]
    config = tiny.config_of(arch, shape, _DTYPE, vocab_size, MAX_POSITION_EMBEDDINGS)
    with whole_folder(target) as folder:
        write_tokenizer(folder)
        _write_hole(folder / _WEIGHT_FILE, tensors)
        write_metadata(folder, config, RECIPE_FILE, {"shape": shape_name})
    return target


def tensors_of(arch: tiny.Architecture, shape: ModelShape) -> list[tiny.TensorSpec]:
    """Return all tensors, with exactly ``shape.num_parameters`` elements in total.

    Raises UsageError: no vocabulary size gives that number of elements.
    """
    inner = sum(math.prod(tensor.shape) for tensor in tiny.tensor_specs(arch, shape, vocab_size=0))
    vocab_size, over = divmod(shape.num_parameters - inner, 2 * shape.hidden_size)
    if over or vocab_size <= 0:
        raise UsageError(f"no vocabulary size gives {shape.num_parameters} parameters for {shape}")
    return list(tiny.tensor_specs(arch, shape, vocab_size))


def _write_hole(path: Path, tensors: Sequence[tiny.TensorSpec]) -> None:
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
