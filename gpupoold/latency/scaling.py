"""Scaling of measured constants to a model or a GPU without measurements.

Each constant scales with the quantities behind its term:

    constant             with the model                 with the GPU
    C1 (projections)     layers (h, m are in the term)  compute
    C2 (attention)       layers (h is in the term)      compute
    C3 (fixed)           layers                         nothing: kernel launches by the host
    k2 (context)         KV bytes per token             memory bandwidth
    c2 (per sequence)    nothing                        nothing: work of the host
    c3 (weights)         layers * (4h^2 + 2hm) * dtype  root of memory bandwidth
    c3 of a group        layers                         root of memory bandwidth

Equation 6 counts a token's KV as 3h; KV bytes are the same for plain attention and right
for grouped-query attention too. The root stands for a fixed part that is half reading weights,
half launching kernels: with the full ratio, and c2 scaled like compute, each packaged pair was
predicted worse from the other pairs (``docs/internals/latency.md`` has the errors). The GPUs of a
group have little to read each; their steps are launches and exchanges, a number per layer. A group
never takes less than the read of its weights.
"""

from __future__ import annotations

import math

from gpupoold.latency.hardware import HardwareProfile
from gpupoold.latency.models import LinearDecode, PrefillModel
from gpupoold.latency.shape import ModelShape


def distance(
    shape: ModelShape, gpu: HardwareProfile, other_shape: ModelShape, other_gpu: HardwareProfile
) -> float:
    """Return the distance of a measured pair from a requested pair: sum of logarithms of ratios.

    Compares the work per token, the KV per token, compute and memory bandwidth.
    """
    ratios = (
        _work(shape) / _work(other_shape),
        shape.kv_bytes_per_token / other_shape.kv_bytes_per_token,
        gpu.bf16_flops / other_gpu.bf16_flops,
        gpu.memory_bandwidth_bytes_per_s / other_gpu.memory_bandwidth_bytes_per_s,
    )
    return math.fsum(abs(math.log(ratio)) for ratio in ratios)


def scale_prefill(
    law: PrefillModel,
    from_shape: ModelShape,
    from_gpu: HardwareProfile,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
) -> PrefillModel:
    """Scale the prefill model of one pair to another pair."""
    layers = to_shape.num_layers / from_shape.num_layers
    compute = from_gpu.bf16_flops / to_gpu.bf16_flops
    return PrefillModel(
        to_shape.hidden_size,
        to_shape.intermediate_size,
        c1=law.c1 * layers * compute,
        c2=law.c2 * layers * compute,
        c3=law.c3 * layers,
        block_size=law.block_size,
    )


def scale_decode(
    law: LinearDecode,
    from_shape: ModelShape,
    from_gpu: HardwareProfile,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
    num_gpus: int = 1,
) -> LinearDecode:
    """Scale the decode model of one pair to another pair, both on groups of ``num_gpus``."""
    kv = to_shape.kv_bytes_on(num_gpus) / from_shape.kv_bytes_on(num_gpus)
    memory = from_gpu.memory_bandwidth_bytes_per_s / to_gpu.memory_bandwidth_bytes_per_s
    return LinearDecode(
        context_s=law.context_s * kv * memory,
        sequence_s=law.sequence_s,
        base_s=_base_s(law.base_s * math.sqrt(memory), from_shape, to_shape, to_gpu, num_gpus),
    )


def _base_s(
    base_s: float,
    from_shape: ModelShape,
    to_shape: ModelShape,
    to_gpu: HardwareProfile,
    num_gpus: int,
) -> float:
    if num_gpus == 1:
        read = _work(to_shape) * to_shape.dtype_bytes
        return base_s * read / (_work(from_shape) * from_shape.dtype_bytes)
    read_s = to_shape.weight_bytes / (num_gpus * to_gpu.memory_bandwidth_bytes_per_s)
    return max(read_s, base_s * to_shape.num_layers / from_shape.num_layers)


def _work(shape: ModelShape) -> int:
    return shape.num_layers * shape.matmul_term
