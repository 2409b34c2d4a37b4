"""Lower bounds of the fast-growing constants, from the hardware's peak.

Public grids end at a few thousand tokens, where noise hides the cost of attention and a fit may
find none. Extrapolated to long prompts such a fit would be far off, so these terms are kept at or
above the cost of a perfect kernel.
"""

from __future__ import annotations

from gpupoold.latency.hardware import HardwareProfile
from gpupoold.latency.models import ATTENTION_BLOCK_SIZE
from gpupoold.latency.shape import ModelShape


def prefill_floors(
    shape: ModelShape, gpu: HardwareProfile, num_gpus: int = 1
) -> tuple[float, float, float]:
    """Return floors of C1, C2, C3 of ``PrefillModel``: only C2 has a positive floor.

    Causal attention over a prompt of ``l`` tokens takes ``2 l^2`` operations per layer and per unit
    of width; the term is ``3 h l^2 / b``.
    """
    width = shape.num_heads * shape.head_dim
    operations = 2 * shape.num_layers * width / (gpu.bf16_flops * num_gpus)
    return 0.0, operations * ATTENTION_BLOCK_SIZE / (3 * shape.hidden_size), 0.0


def decode_floors(
    shape: ModelShape, gpu: HardwareProfile, num_gpus: int = 1
) -> tuple[float, float, float]:
    """Return floors of k2, c2, c3 of ``LinearDecode``: only k2's, reading a token's KV, is set."""
    read_s = shape.kv_bytes_per_token / (gpu.memory_bandwidth_bytes_per_s * num_gpus)
    return read_s, 0.0, 0.0
