"""Layers of 8-bit integers without oneDNN handles compute what vLLM's own layers compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    Int8ScaledMMLinearLayerConfig,
)

from gpupoold.worker.engine.cpu_build import TensorInt8Kernel

NAMES = ["weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj"]
NUM_IN, NUM_OUT = 64, 96


def layer(*, is_static: bool, is_symmetric: bool, is_channelwise: bool) -> nn.Module:
    """A fused layer of two parts as vLLM's loader leaves it."""
    torch.manual_seed(1)
    made = nn.Module()
    made.logical_widths = [NUM_OUT // 2, NUM_OUT // 2]  # type: ignore[assignment]
    weight = torch.randint(-127, 128, (NUM_OUT, NUM_IN), dtype=torch.int8)
    scales = torch.rand(NUM_OUT if is_channelwise else 2, 1) / 1000
    made.weight = nn.Parameter(weight, requires_grad=False)
    made.weight_scale = nn.Parameter(scales, requires_grad=False)
    input_scale = nn.Parameter(torch.tensor([0.03, 0.02]), requires_grad=False)
    zero = nn.Parameter(torch.tensor([3, -9], dtype=torch.int8), requires_grad=False)
    made.register_parameter("input_scale", input_scale if is_static else None)
    has_zero = is_static and not is_symmetric
    made.register_parameter("input_zero_point", zero if has_zero else None)
    return made.requires_grad_(False)


HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()


@pytest.mark.skipif(
    not any(name in Path("/proc/cpuinfo").read_text() for name in ("vnni", "amx_int8")),
    reason="vLLM's own layer saturates sums of 16 bits on a processor without VNNI",
)
@pytest.mark.parametrize("is_static", [False, True])
@pytest.mark.parametrize("is_symmetric", [False, True])
@pytest.mark.parametrize("is_channelwise", [False, True])
def test_results_are_those_of_vllms_layer(
    is_static: bool, is_symmetric: bool, is_channelwise: bool
) -> None:
    if is_symmetric and HAS_AMX:
        pytest.skip("vLLM's own layer refuses float32 on a processor with AMX")
    config = Int8ScaledMMLinearLayerConfig(
        is_static_input_scheme=is_static,
        is_channelwise=is_channelwise,
        input_symmetric=is_symmetric,
    )
    inputs, bias = torch.randn(2, 5, NUM_IN), torch.randn(NUM_OUT)
    results = []
    for kind in (TensorInt8Kernel, CPUInt8ScaledMMLinearKernel):
        kernel = kind(config, layer_param_names=NAMES)
        made = layer(is_static=is_static, is_symmetric=is_symmetric, is_channelwise=is_channelwise)
        kernel.process_weights_after_loading(made)
        results.append(kernel.apply_weights(made, inputs, bias))
        if kind is TensorInt8Kernel:
            assert made.weight.shape == (NUM_IN, NUM_OUT)
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-4)


def test_vllm_still_chooses_the_layer_that_is_replaced() -> None:
    kernel = init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="m"
    )
    assert type(kernel) is CPUInt8ScaledMMLinearKernel
