"""Quantized forms of the tiny checkpoints, made offline, in the formats that model hubs have.

``python -m scripts.tiny_quantized DIR`` makes a tiny Llama and, from its weights, one
folder per format: ``tiny-llama-gptq``, ``tiny-llama-awq`` and so on. The weights are rounded to the
nearest value of the format, without calibration.

Embeddings, norms and the output layer are not quantized. Equal arguments give equal bytes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpupoold.checkpoints.maker import maker_parser, print_made, whole_folder
from gpupoold.checkpoints.tiny import DEFAULT_SIZE, RECIPE_FILE, Recipe, make_checkpoint
from gpupoold.errors import UsageError
from gpupoold.units import parse_size_bytes

if TYPE_CHECKING:
    import torch

GROUP_SIZE = 32
_BITS = 4
_PER_WORD = 32 // _BITS
# The column of each nibble of an AWQ word, from the lowest nibble on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GPTQ_ZERO = 8  # of symmetric weights; GPTQ files store the zero point less one
_FP8_MAX = 448.0
_NOT_QUANTIZED = ("block_sparse_moe.gate", "lm_head")  # ends of the names of plain linear layers

Tensors = dict[str, "torch.Tensor"]


@dataclass(frozen=True, slots=True)
class QuantizedFormat:
    """A format: the tensors that replace a weight of the shape (out, in), and the configuration.

    ``dtype`` is the dtype of the tensors that are not quantized.
    """

    key: str
    settings: dict[str, Any]
    quantize: Callable[[torch.Tensor], Tensors]
    dtype: str = "float16"


def _awq(weight: torch.Tensor) -> Tensors:
    import torch

    groups = weight.view(weight.shape[0], -1, GROUP_SIZE)
    low = groups.amin(2).clamp(max=0)
    high = groups.amax(2).clamp(min=0)
    scale = ((high - low) / 15).clamp(min=1e-6).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    numbers = (groups / scale[..., None]).round().add(zero[..., None]).clamp(0, 15)
    return {
        "qweight": _packed(numbers.view_as(weight).t(), _AWQ_ORDER),
        "qzeros": _packed(zero.t(), _AWQ_ORDER),
        "scales": scale.t().to(torch.float16).contiguous(),
    }


def _gptq(weight: torch.Tensor) -> Tensors:
    import torch

    numbers, scale = _symmetric(weight)
    rows = torch.arange(weight.shape[1], dtype=torch.int32)
    zeros = torch.full((scale.shape[1], weight.shape[0]), _GPTQ_ZERO - 1)
    return {
        "qweight": _packed(numbers).t().contiguous(),
        "qzeros": _packed(zeros),
        "scales": scale.t().to(torch.float16).contiguous(),
        "g_idx": rows // GROUP_SIZE,
    }


def _w4a16(weight: torch.Tensor) -> Tensors:
    import torch

    numbers, scale = _symmetric(weight)
    return {
        "weight_packed": _packed(numbers),
        "weight_scale": scale.to(torch.float16),
        "weight_shape": torch.tensor(weight.shape, dtype=torch.int64),
    }


def _w8a8(weight: torch.Tensor) -> Tensors:
    import torch

    scale = (weight.abs().amax(1, keepdim=True) / 127).clamp(min=1e-9)
    numbers = (weight / scale).round().clamp(-127, 127)
    return {"weight": numbers.to(torch.int8), "weight_scale": scale}


def _fp8(weight: torch.Tensor) -> Tensors:
    import torch

    scale = (weight.abs().amax() / _FP8_MAX).clamp(min=1e-9)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale.view(1)}


def _fp8_channel(weight: torch.Tensor) -> Tensors:
    import torch

    scale = (weight.abs().amax(1, keepdim=True) / _FP8_MAX).clamp(min=1e-9)
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _symmetric(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return numbers between 0 and 15 with the zero point 8, and a scale for each group."""
    groups = weight.view(weight.shape[0], -1, GROUP_SIZE)
    scale = (groups.abs().amax(2) / 7).clamp(min=1e-6).half().float()
    numbers = (groups / scale[..., None]).round().clamp(-8, 7) + _GPTQ_ZERO
    return numbers.view_as(weight), scale


def _packed(numbers: torch.Tensor, order: Sequence[int] = range(_PER_WORD)) -> torch.Tensor:
    """Pack eight neighbours of each row into a word of 32 bits."""
    import torch

    shifts = torch.arange(0, 32, _BITS, dtype=torch.int64)
    words = numbers.to(torch.int64).reshape(numbers.shape[0], -1, _PER_WORD)[..., list(order)]
    packed = (words << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _compressed(
    name: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [f"re:.*{last}$" for last in _NOT_QUANTIZED],
    }


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "group_size": GROUP_SIZE}
_PER_CHANNEL = {"symmetric": True, "strategy": "channel"}
_PER_TOKEN = {"symmetric": True, "strategy": "token", "dynamic": True}

FORMATS = {
    one.key: one
    for one in (
        QuantizedFormat(
            "awq",
            {
                "quant_method": "awq",
                "bits": _BITS,
                "group_size": GROUP_SIZE,
                "zero_point": True,
                "version": "gemm",
                "modules_to_not_convert": list(_NOT_QUANTIZED),
            },
            _awq,
        ),
        QuantizedFormat(
            "gptq",
            {
                "quant_method": "gptq",
                "bits": _BITS,
                "group_size": GROUP_SIZE,
                "desc_act": False,
                "sym": True,
                "lm_head": False,
            },
            _gptq,
        ),
        QuantizedFormat(
            "w4a16", _compressed("pack-quantized", {**_INT4, "strategy": "group"}, None), _w4a16
        ),
        QuantizedFormat(
            "w8a8",
            _compressed(
                "int-quantized",
                {"num_bits": 8, "type": "int", **_PER_CHANNEL},
                {"num_bits": 8, "type": "int", **_PER_TOKEN},
            ),
            _w8a8,
            "float32",
        ),
        QuantizedFormat(
            "fp8", {"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8, "bfloat16"
        ),
        QuantizedFormat(
            "fp8-channel",
            _compressed(
                "float-quantized",
                {"num_bits": 8, "type": "float", **_PER_CHANNEL},
                {"num_bits": 8, "type": "float", **_PER_TOKEN},
            ),
            _fp8_channel,
            "bfloat16",
        ),
    )
}


def make_quantized(parent: Path, key: str, recipe: Recipe) -> Path:
    """Make (or keep, if present) ``recipe``'s checkpoint in the format ``key`` below ``parent``.

    Raises:
        UsageError: the format is unknown, or the recipe is not possible.
        Refused: the folder of the checkpoint that is quantized exists with other content.
    """
    if key not in FORMATS:
        raise UsageError(f"unknown format {key!r}", f"use {', '.join(FORMATS)}")
    source = make_checkpoint(parent, recipe)
    target = parent / f"{source.name}-{key}"
    made = {**asdict(recipe), "format": key}
    if _recipe_of(target) == made:
        return target
    with whole_folder(target) as folder:
        shutil.copytree(source, folder, dirs_exist_ok=True)
        _quantize_weights(folder / "model.safetensors", FORMATS[key])
        config = json.loads((folder / "config.json").read_text())
        config |= {"dtype": FORMATS[key].dtype, "quantization_config": FORMATS[key].settings}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / RECIPE_FILE).write_text(json.dumps(made, indent=2) + "\n")
    return target


def _quantize_weights(path: Path, form: QuantizedFormat) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    dtype = getattr(torch, form.dtype)
    tensors: Tensors = {}
    for name, tensor in load_file(path).items():
        module, _, last = name.rpartition(".")
        is_linear = last == "weight" and tensor.dim() == 2 and "embed" not in module
        if not is_linear or module.endswith(_NOT_QUANTIZED):
            tensors[name] = tensor.to(dtype)
            continue
        for part, replacement in form.quantize(tensor.float()).items():
            tensors[f"{module}.{part}"] = replacement
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # safetensors makes files readable only by the owner


def _recipe_of(folder: Path) -> Any:
    try:
        return json.loads((folder / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line: print one line per checkpoint, errors to stderr; return the exit
    code.
    """
    parser = maker_parser("scripts.tiny_quantized", "Make tiny quantized checkpoints.")
    parser.add_argument("--arch", default="llama", help="family of the tiny checkpoint")
    parser.add_argument("--format", nargs="+", default=list(FORMATS), help=", ".join(FORMATS))
    parser.add_argument("--size", default=DEFAULT_SIZE, help="bytes of weights at float32")
    return print_made(_made(parser.parse_args(argv)), lambda file: file.st_size, as_json=False)


def _made(args: argparse.Namespace) -> Iterator[Path]:
    try:
        size_bytes = parse_size_bytes(args.size)
    except ValueError as error:
        raise UsageError(f"--size: {error}") from None
    for key in args.format:
        yield make_quantized(args.dir, key, Recipe(args.arch, size_bytes))


if __name__ == "__main__":
    sys.exit(main())
