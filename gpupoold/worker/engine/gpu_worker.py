"""vLLM's CUDA worker with weights and KV in gpupool's address ranges (vLLM's ``worker_cls``)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker

from gpupoold.worker.engine.pooled_memory import PooledMemory
from gpupoold.worker.weights.loading import current_load


class CudaWorker(PooledMemory, Worker):
    """vLLM's CUDA worker on a device whose pages belong to gpupool.

    Unlike vLLM's CPU worker, the CUDA worker runs the model during the load, to compile, tune
    kernels and capture CUDA graphs. Weights and KV must be mapped meanwhile.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, move the weights into the address range and make the weights resident."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        current_load().bring_weights()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """Return vLLM's layouts, beginning with layouts whose blocks are outermost.

        A block is then contiguous: the least KV of a model is one page instead of a page per layer,
        and copies are long.
        ``VLLM_KV_CACHE_LAYOUT`` takes precedence.
        """
        names = super().get_supported_kv_cache_layouts()
        return sorted(names, key=lambda name: not KVCacheLayout[name].is_block_outermost)

    def determine_available_memory(self) -> int:
        """Return the KV budget after vLLM's profiling run.

        The run compiles, and fails if activations exceed the reserve. vLLM takes the budget as
        given and measures nothing.
        """
        self.cache_config.kv_cache_memory_bytes = super().determine_available_memory()
        return int(Worker.determine_available_memory(self))

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture graphs with every KV block readable and writable."""
        with current_load().kv_scratch():
            times = super().compile_or_warm_up_model()
            # vLLM captures graphs, and runs code between two graphs, on separate streams. The
            # device does not wait for these streams before it unmaps pages.
            torch.cuda.synchronize()
        return times
