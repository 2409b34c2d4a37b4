"""Adaptations of vLLM's CPU build to several engines in a process, with weights in pages.

vLLM repacks some weights of linear layers into oneDNN handles, or keeps repacked weights in a
closure. Neither can be placed in pages or in a snapshot.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import vllm._custom_ops as custom_ops
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers import utils
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding
from vllm.platforms import PlatformEnum
from vllm.platforms.cpu import CpuPlatform

from gpupoold.errors import Refused

_KERNEL = RotaryEmbedding.forward_cpu


class TensorInt8Kernel(CPUInt8ScaledMMLinearKernel):
    """vLLM's linear layer of 8-bit integers, computed by torch instead of a oneDNN handle."""

    def process_weights_for_onednn(self, layer: torch.nn.Module) -> None:
        """Prepare the scales as vLLM does, and keep the weights as a tensor of (in, out)."""
        name = self.layer_param_names[0]
        weight = getattr(layer, name).data
        super().process_weights_for_onednn(layer)
        del self.dnnl_handler
        setattr(layer, name, torch.nn.Parameter(weight.t(), requires_grad=False))

    def _apply_weights_onednn(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight, scale, input_scale, input_zero, adjustment = self._get_layer_params(layer)
        numbers, row_scale, row_zero = custom_ops.onednn_scaled_int8_quant(
            x.reshape(-1, x.shape[-1]), input_scale, input_zero, self.config.input_symmetric
        )
        out = torch._int_mm(numbers, weight).float() * scale.view(1, -1) * row_scale
        if row_zero is not None:
            out -= row_scale * row_zero * adjustment
        if bias is not None:
            out += bias
        return out.to(x.dtype).reshape(*x.shape[:-1], -1)


def adapt_cpu_build() -> None:
    """Keep the weights of linear layers in torch tensors, and replace kernels once.

    To be called before the process builds an engine.
    """
    correct_rotary_embedding()
    custom_ops._supports_onednn = False  # then vLLM uses ``F.linear``
    utils.check_cpu_sgl_kernel = lambda *_: False
    kernels: dict[PlatformEnum, list[type[Any]]] = linear._POSSIBLE_INT8_KERNELS
    kernels[PlatformEnum.CPU] = [TensorInt8Kernel]
    # vLLM replaces Triton kernels at every engine, wraps the replacements again, and searches all
    # modules. The search fails after n-gram drafts have loaded llvmlite, some of whose objects are
    # no plain objects.
    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(once))  # noqa: B010


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


class MaskedAdapters(PunicaWrapperCPU):
    """vLLM's computation with zeros as the low-rank activations of the base model's tokens.

    vLLM marks tokens of the base model with slot -1. Its CUDA kernels skip such tokens; its CPU
    code reads slot -1 as the last slot, and adds another request's adapter to tokens of the base
    model.
    """

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


def check_first_inputs(model: str, layers: Mapping[str, Any]) -> None:
    """Let the first call of each attention layer raise Refused if its inputs do not fit.

    ``layers`` are vLLM's layers by name. Later calls are not slowed down.

    vLLM takes the numbers of heads from config.json, and reads keys as (tokens, heads, size). If
    the projections of the model make more heads than config.json says, one token becomes several.
    vLLM's CPU kernel then writes keys of tokens that have no slot: to whatever slots were there
    before, whose pages may be unmapped. Such a write ends the process, or changes the KV of another
    request. CUDA kernels take the number of tokens from the slots, and write no such keys.
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
    if not torch.compiler.is_compiling():  # compiled code contains the check, which takes no time
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
    result: torch.Tensor = type(layer).forward(layer, query, key, value, *arguments, **options)
    return result
