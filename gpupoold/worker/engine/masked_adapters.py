"""vLLM's LoRA computation on the CPU, corrected for steps that mix adapters and the base model.

vLLM marks tokens of the base model with slot -1. Its CUDA kernels skip such tokens; its CPU code
reads slot -1 as the last slot, and adds another request's adapter to tokens of the base model.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU


class MaskedAdapters(PunicaWrapperCPU):
    """vLLM's computation with zeros as the low-rank activations of the base model's tokens."""

    def _apply_shrink(
        self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float
    ) -> None:
        super()._apply_shrink(y, x, w_t_all, scale)
        _mask(y.view(-1, y.shape[-1]), self.token_lora_indices)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        _mask(x, self.token_lora_indices)
        super().add_lora_embedding(y, x, lora_b_stacked, add_inputs, **kwargs)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        *,
        buffer: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> None:
        rows = x.view(-1, x.shape[-1])
        # For prompt log-probabilities vLLM has a row per prompt token, and adapters by sampled row.
        if len(rows) != len(self.sampler_indices):
            return
        x = rows.clone()
        _mask(x, self.sampler_indices)
        super().add_lora_logits(
            y, x, lora_a_stacked, lora_b_stacked, scale, buffer=buffer, **kwargs
        )


def _mask(rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Set the rows of the base model's tokens to zero."""
    rows[: len(slots)][slots[: len(rows)] < 0] = 0
