"""Dimensions of the models measured on a GPU: dimensions of public models, without weights.

``tensors`` lists the tensors of a checkpoint with Hugging Face names. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from gpupoold.checkpoints.tiny_tokenizer import VOCAB_SIZE

BYTES_PER_ELEMENT = {"BF16": 2, "F8_E4M3": 1, "F32": 4}  # by the names in safetensors files
MAX_POSITION_EMBEDDINGS = 8192

# As in gpupoold.checkpoints.tiny, in units of 1/sqrt(fan_in); chosen so that greedy text varies.
_QUERY_KEY_GAIN = 2.0
_OUTPUT_GAIN = 2.0
_LOGIT_STD = 3.0
_NORM_STD = 0.1
_BIAS_STD = 0.1
# Of quantised weights before their scale: six standard deviations are below the largest number.
_FP8_STD = 64.0


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder. ``of`` names the public model that has these dimensions.

    Weights are bfloat16; with ``is_fp8``, matrices but the tables are FP8 with a scale for each.
    """

    name: str
    of: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    is_qwen2: bool = False
    is_tied: bool = False
    is_fp8: bool = False

    @property
    def weight_bytes(self) -> int:
        """Bytes of a checkpoint's tensors."""
        return sum(tensor.num_bytes for tensor in tensors(self))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of keys and values of a token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * BYTES_PER_ELEMENT["BF16"]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a checkpoint: normal around ``mean``, ``std`` wide."""

    name: str
    shape: tuple[int, ...]
    std: float
    mean: float = 0.0
    dtype: str = "BF16"

    @property
    def element_bytes(self) -> int:
        """Bytes of one number."""
        return BYTES_PER_ELEMENT[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.element_bytes * math.prod(self.shape)


# From the models' config.json on the Hugging Face hub.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1B", "Llama-3.2-1B", 16, 2048, 8192, 32, 8, 64, 128256, is_tied=True),
        Shape("3B", "Llama-3.2-3B", 28, 3072, 8192, 24, 8, 128, 128256, is_tied=True),
        Shape("8B", "Llama-3.1-8B", 32, 4096, 14336, 32, 8, 128, 128256),
        Shape("8B-FP8", "Llama-3.1-8B-FP8", 32, 4096, 14336, 32, 8, 128, 128256, is_fp8=True),
        Shape("14B", "Qwen2.5-14B", 48, 5120, 13824, 40, 8, 128, 152064, is_qwen2=True),
    )
}
# Small versions for a dry run on an emulated device: a few MB each, without FP8, for which vLLM has
# no kernels on CPUs.
TINY_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1B", "", 2, 128, 256, 4, 2, 32, VOCAB_SIZE, is_tied=True),
        Shape("3B", "", 3, 128, 512, 4, 2, 32, VOCAB_SIZE, is_tied=True),
        Shape("8B", "", 4, 256, 768, 4, 2, 64, VOCAB_SIZE),
        Shape("8B-FP8", "", 4, 256, 768, 4, 2, 64, VOCAB_SIZE),
        Shape("14B", "", 4, 256, 1024, 4, 2, 64, VOCAB_SIZE, is_qwen2=True),
    )
}
# Versions for a dry run on a GPU's driver, with larger pages: tens of MB each, with head sizes that
# FlashAttention supports.
SMALL_SHAPES = {
    shape.name: shape
    for shape in (
        Shape("1B", "", 2, 1024, 4096, 16, 4, 64, VOCAB_SIZE, is_tied=True),
        Shape("3B", "", 3, 1024, 4096, 16, 4, 64, VOCAB_SIZE, is_tied=True),
        Shape("8B", "", 4, 1024, 4096, 16, 4, 64, VOCAB_SIZE),
        Shape("8B-FP8", "", 4, 1024, 4096, 16, 4, 64, VOCAB_SIZE, is_fp8=True),
        Shape("14B", "", 6, 1024, 4096, 16, 4, 64, VOCAB_SIZE, is_qwen2=True),
    )
}


def tensors(shape: Shape) -> list[Tensor]:
    """All tensors of a checkpoint, in the order in which they lie in its file."""
    hidden = shape.hidden_size
    # A tied table is also the output layer, so its scale sets the scale of the logits.
    embedding_std = _LOGIT_STD / math.sqrt(hidden) if shape.is_tied else 1.0
    found = [Tensor("model.embed_tokens.weight", (shape.vocab_size, hidden), embedding_std)]
    for index in range(shape.num_layers):
        found += _layer(shape, f"model.layers.{index}.")
    found.append(_norm("model.norm", hidden))
    if not shape.is_tied:
        found.append(_matrix("lm_head", hidden, shape.vocab_size, _LOGIT_STD))
    return found


def config(shape: Shape) -> dict[str, Any]:
    """What is of this shape in ``config.json``."""
    found: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM" if shape.is_qwen2 else "LlamaForCausalLM"],
        "model_type": "qwen2" if shape.is_qwen2 else "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": MAX_POSITION_EMBEDDINGS,
        "dtype": "bfloat16",
    }
    if shape.is_fp8:
        found["quantization_config"] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    return found


def _layer(shape: Shape, prefix: str) -> Iterator[Tensor]:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    width, kv_width = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    linear = _fp8_linear if shape.is_fp8 else _linear
    yield _norm(prefix + "input_layernorm", hidden)
    for name, out, gain in (
        ("q", width, _QUERY_KEY_GAIN),
        ("k", kv_width, _QUERY_KEY_GAIN),
        ("v", kv_width, 1.0),
    ):
        yield from linear(f"{prefix}self_attn.{name}_proj", hidden, out, gain)
        if shape.is_qwen2:
            yield Tensor(f"{prefix}self_attn.{name}_proj.bias", (out,), _BIAS_STD)
    yield from linear(prefix + "self_attn.o_proj", width, hidden, _OUTPUT_GAIN)
    yield _norm(prefix + "post_attention_layernorm", hidden)
    yield from linear(prefix + "mlp.gate_proj", hidden, inner, 1.0)
    yield from linear(prefix + "mlp.up_proj", hidden, inner, 1.0)
    yield from linear(prefix + "mlp.down_proj", inner, hidden, _OUTPUT_GAIN)


def _linear(name: str, num_in: int, num_out: int, gain: float) -> Iterator[Tensor]:
    yield _matrix(name, num_in, num_out, gain)


def _fp8_linear(name: str, num_in: int, num_out: int, gain: float) -> Iterator[Tensor]:
    yield Tensor(name + ".weight", (num_out, num_in), _FP8_STD, dtype="F8_E4M3")
    scale = gain / math.sqrt(num_in) / _FP8_STD
    yield Tensor(name + ".weight_scale", (1,), 0.0, mean=scale, dtype="F32")


def _matrix(name: str, num_in: int, num_out: int, gain: float) -> Tensor:
    return Tensor(name + ".weight", (num_out, num_in), gain / math.sqrt(num_in))


def _norm(name: str, width: int) -> Tensor:
    return Tensor(name + ".weight", (width,), _NORM_STD, mean=1.0)
