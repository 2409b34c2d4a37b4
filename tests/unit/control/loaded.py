"""What a worker tells of a model that it has loaded."""

from __future__ import annotations

from gpupoold.wire import messages as m

WEIGHT_BYTES = 1 << 20


def loaded(name: str) -> m.LoadedModel:
    """A small model that generates text."""
    return m.LoadedModel(
        name=name,
        architecture="",
        max_model_len=100,
        dtype="float32",
        block_size=32,
        num_gpu_blocks=100,
        weight_bytes=WEIGHT_BYTES,
        kv_bytes_per_token=100,
        supported_tasks=("generate",),
    )
