"""A check of the shapes that attention layers get, at the first call of each layer.

vLLM takes the numbers of heads from config.json, and reads keys as (tokens, heads, size). If the
projections of the model make more heads than config.json says, one token becomes several. vLLM's
CPU kernel then writes keys of tokens that have no slot: to whatever slots were there before, whose
pages may be unmapped. Such a write ends the process, or changes the KV of another request. CUDA
kernels take the number of tokens from the slots, and write no such keys.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.attention import Attention

from gpupoold.errors import Refused


def check_first_inputs(model: str, layers: Mapping[str, Any]) -> None:
    """Let the first call of each attention layer raise Refused if its inputs do not fit.

    ``layers`` are vLLM's layers by name. Later calls are not slowed down.
    """
    for name, layer in layers.items():
        if isinstance(layer, Attention):
            # Not a hook: the Transformers backend calls ``forward`` itself.
            layer.forward = partial(_first_forward, model, name, layer)  # type: ignore[method-assign]


def _first_forward(
    model: str,
    name: str,
    layer: Attention,
    query: torch.Tensor,
    key: torch.Tensor | None,
    value: torch.Tensor | None,
    *arguments: Any,
    **options: Any,
) -> torch.Tensor:
    del layer.forward  # the class's own from now on
    for what, tensor, heads, size in (
        ("queries", query, layer.num_heads, layer.head_size),
        ("keys", key, layer.num_kv_heads, layer.head_size),
        ("values", value, layer.num_kv_heads, layer.head_size_v),
    ):
        if tensor is not None and math.prod(tensor.shape[1:]) != heads * size:
            raise Refused(
                f"{model}: {name} gets {what} of {math.prod(tensor.shape[1:])} numbers for each "
                f"token, config.json says {heads} heads of {size}",
                "correct the numbers of heads in config.json, as in the original model",
            )
    result: torch.Tensor = layer.forward(query, key, value, *arguments, **options)
    return result
