"""What vLLM keeps in the process for a model: prepared before a load, dropped after the model."""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.compilation.wrapper import TorchCompileWithNoGuardsWrapper
from vllm.model_executor.layers import rotary_embedding

from gpupoold.worker import torch_threads
from gpupoold.worker.engine.pooled_memory import whole_model
from gpupoold.worker.heap import HEAP
from gpupoold.worker.weights import snapshot_loader


def drop_runner(runner: Any) -> None:
    """Drop a runner's model and caches, and what vLLM keeps of the model for the process."""
    runner.compilation_config.static_forward_context.clear()
    if getattr(runner, "model", None) is not None:
        forget_compiled(whole_model(runner))
    for holder in ("model", "drafter", "speculator"):  # the drafter's holder by model runner
        if hasattr(runner, holder):
            setattr(runner, holder, None)
    runner.kv_caches.clear()


def forget_compiled(model: nn.Module) -> None:
    """Remove the hooks that vLLM registers with the compiler for each compiled module.

    The hooks are in a list of the process, which keeps the module alive with its code and CUDA
    graphs. vLLM does not remove the hooks.
    """
    for module in model.modules():
        if isinstance(module, TorchCompileWithNoGuardsWrapper):
            module.cleanup()


def start_load(*, skips_checkpoint: bool) -> None:
    """Prepare this process for building another engine."""
    torch_threads.set_for_load()
    if skips_checkpoint:
        snapshot_loader.register()
    # Not public: vLLM shares rotary modules through this cache. A relocated buffer of one model
    # must not appear in another model.
    rotary_embedding._ROPE_DICT.clear()
    HEAP.freeze()
