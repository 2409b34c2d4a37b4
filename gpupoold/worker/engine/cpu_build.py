"""Adaptations of vLLM's CPU build to several engines in a process, with weights in pages.

vLLM repacks some weights of linear layers into oneDNN handles, or keeps repacked weights in a
closure. Neither can be placed in pages or in a snapshot.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import vllm._custom_ops as custom_ops
from vllm.model_executor.kernels import linear
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.layers import utils
from vllm.platforms import PlatformEnum
from vllm.platforms.cpu import CpuPlatform


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
    custom_ops._supports_onednn = False  # then vLLM uses ``F.linear``
    utils.check_cpu_sgl_kernel = _never
    kernels: dict[PlatformEnum, list[type[Any]]] = linear._POSSIBLE_INT8_KERNELS
    kernels[PlatformEnum.CPU] = [TensorInt8Kernel]
    # vLLM replaces Triton kernels at every engine, wraps the replacements again, and searches all
    # modules. The search fails after n-gram drafts have loaded llvmlite, some of whose objects are
    # no plain objects.
    once = functools.cache(CpuPlatform.register_triton_kernel_overrides)
    setattr(CpuPlatform, "register_triton_kernel_overrides", staticmethod(once))  # noqa: B010


def _never(*_: object) -> bool:
    return False
