"""A correction of vLLM's CPU kernels, for emulated devices and for vLLM alone beside them."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_KERNEL = RotaryEmbedding.forward_cpu


def correct_rotary_embedding() -> None:
    """Rotate queries of shape (tokens, heads, size) by torch.

    vLLM's CPU kernel takes the stride of the second last dimension for the stride of tokens, so
    that it rotates other heads than it should, for example in MLA and LFM2. Queries of shape
    (tokens, heads * size) use the kernel.
    """
    RotaryEmbedding.forward_cpu = _forward_cpu


def _forward_cpu(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    forward = _KERNEL if query.dim() == 2 else RotaryEmbedding.forward_native
    rotated: tuple[torch.Tensor, torch.Tensor | None] = forward(self, positions, query, key)
    return rotated
