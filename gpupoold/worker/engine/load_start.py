"""The begin of a load, on the leader of a group, on a follower and on a single GPU."""

from __future__ import annotations

from vllm.model_executor.layers import rotary_embedding

from gpupoold.worker import torch_threads
from gpupoold.worker.heap import HEAP
from gpupoold.worker.weights import snapshot_loader


def start_load(*, skips_checkpoint: bool) -> None:
    """Prepare this process for building another engine."""
    torch_threads.set_for_load()
    if skips_checkpoint:
        snapshot_loader.register()
    # Not public: vLLM shares rotary modules through this cache. A relocated buffer of one model
    # must not appear in another model.
    rotary_embedding._ROPE_DICT.clear()
    HEAP.freeze()
