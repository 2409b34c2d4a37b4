"""vLLM's CUDA worker with weights and KV in our address ranges (vLLM's ``worker_cls`` option)."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.gpu_worker import Worker

from gpupoold.worker.engine.pooled_memory import PooledMemory
from gpupoold.worker.weights.loading import current_load


class CudaWorker(PooledMemory, Worker):
    """vLLM's CUDA worker on a device whose pages are ours.

    Unlike the CPU's it runs the model while it is being loaded: to compile it, to tune
    kernels, to capture CUDA graphs. Weights and KV then have to be behind their addresses.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, move the weights into the address range and make them resident for what follows."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        current_load().bring_weights()

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """vLLM's, those with blocks outermost first: the bytes of a block then lie side by side.

        So the least KV that a model can have is a page, and not one in every layer, and what is
        copied is long. ``VLLM_KV_CACHE_LAYOUT`` has the last word.
        """
        names = super().get_supported_kv_cache_layouts()
        return sorted(names, key=lambda name: not KVCacheLayout[name].is_block_outermost)

    def determine_available_memory(self) -> int:
        """The KV budget, after vLLM's profiling run: it compiles, and fails if activations do
        not fit into the reserve. vLLM takes the budget as given and measures nothing."""
        self.cache_config.kv_cache_memory_bytes = super().determine_available_memory()
        return int(Worker.determine_available_memory(self))

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture graphs with every KV block readable and writable."""
        with current_load().kv_scratch():
            times = super().compile_or_warm_up_model()
            # Graphs are captured on streams of their own, and what lies between two graphs runs
            # there: the device does not know of these streams when it takes the pages away.
            torch.cuda.synchronize()
        return times
