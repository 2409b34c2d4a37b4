"""The most tokens that a group of GPUs makes. Pure."""

from __future__ import annotations

from gpupoold.latency.models import LatencyModel


def group_throughput(
    latency: LatencyModel,
    num_gpus: int,
    room_bytes: int,
    kv_bytes_per_token: int,
    context_tokens: float,
    tbt_s: float,
) -> float:
    """Return the most tokens per second and GPU of a group of ``num_gpus`` (Aladdin, equation 6).

    ``latency`` holds for the group: its iteration time takes the place of equation 5, which
    interpolates between groups. ``room_bytes`` is the memory beside the weights, on all GPUs. The
    batch is as large as the KV of sequences of ``context_tokens`` allows, or as a step of ``tbt_s``
    allows; 0 if neither allows a sequence.
    """
    by_memory = room_bytes / max(1.0, context_tokens * kv_bytes_per_token)
    context = max(1, round(context_tokens))
    one_s = latency.decode_step_s(1, context)
    per_sequence_s = latency.decode_step_s(2, 2 * context) - one_s  # the laws are linear
    base_s = one_s - per_sequence_s
    by_target = (tbt_s - base_s) / max(per_sequence_s, 1e-9)
    if min(by_memory, by_target) < 1:
        return 0.0
    full_s = base_s + by_memory * per_sequence_s
    return min(by_memory / (num_gpus * full_s), by_target / (num_gpus * tbt_s))
