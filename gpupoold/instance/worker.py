"""vLLM worker classes that put weights and KV into our regions (vLLM's ``worker_cls`` option)."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.platforms import current_platform
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_worker import Worker

from gpupoold.instance.loading import current_load


class _PooledMemory:
    """Mixed in before vLLM's worker: the three places where it takes device memory."""

    model_runner: Any
    local_rank: int
    distributed_init_method: str

    def init_device(self) -> None:
        """Make the process groups all models share, then go on as vLLM does."""
        _ensure_process_groups(self.distributed_init_method, self.local_rank)
        super().init_device()  # type: ignore[misc]

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load as vLLM does, then move the weights into the model's region."""
        super().load_model(load_dummy_weights=load_dummy_weights)  # type: ignore[misc]
        current_load().take_weights(self.model_runner.get_model())

    def determine_available_memory(self) -> int:
        """The device's memory less the weights: what the model could have when alone."""
        specs = self.model_runner.get_kv_cache_spec().values()
        return current_load().kv_budget_bytes([spec.page_size_bytes for spec in specs])

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[Any]:
        if tag == "kv_cache":
            return current_load().kv_allocation()
        return contextlib.nullcontext()


def _ensure_process_groups(init_method: str, local_rank: int) -> None:
    """Groups of one rank for every kind of model.

    vLLM makes them for the first model of a process, and leaves the expert
    group out when that one is dense; without any model it makes them all.
    """
    if parallel_state.model_parallel_is_initialized():
        return
    if current_platform.is_cuda():
        current_platform.set_device(torch.device(f"cuda:{local_rank}"))
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            world_size=1,
            rank=0,
            distributed_init_method=init_method,
            local_rank=local_rank,
            backend=current_platform.dist_backend,
        )
        parallel_state.initialize_model_parallel()


class EmulatedWorker(_PooledMemory, CPUWorker):
    """vLLM's CPU worker on an emulated device."""


class CudaWorker(_PooledMemory, Worker):
    """vLLM's CUDA worker on a device whose pages are ours.

    Unlike the CPU's it runs the model while it is being loaded: to compile it, to tune
    kernels, to capture CUDA graphs. Weights and KV then have to be behind their addresses.
    """

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load, move the weights into the region and make them resident for what follows."""
        super().load_model(load_dummy_weights=load_dummy_weights)
        current_load().bring_weights()

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
