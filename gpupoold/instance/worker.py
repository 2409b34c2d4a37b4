"""vLLM worker classes that put weights and KV into our regions (vLLM's ``worker_cls`` option)."""

from __future__ import annotations

import contextlib
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from gpupoold.instance.loading import current_load


class _PooledMemory:
    """Mixed in before vLLM's worker: the three places where it takes device memory."""

    model_runner: Any

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, then move the weights into the model's region."""
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        current_load().take_weights(self.model_runner.get_model())

    def determine_available_memory(self) -> int:
        """The device's memory less the weights: what the model could have when alone."""
        return current_load().kv_budget_bytes()

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        if tag == "kv_cache":
            return current_load().kv_allocation()
        return contextlib.nullcontext()


class EmulatedWorker(_PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""


class CudaWorker(_PooledMemory, Worker):
    """vLLM's CUDA worker on a device whose pages are ours."""
