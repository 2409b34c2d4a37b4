"""Disposal of vLLM's model runners."""

from __future__ import annotations

from typing import Any

from gpupoold.worker.engine.compiled import forget_compiled
from gpupoold.worker.engine.pooled_memory import whole_model


def drop_runner(runner: Any) -> None:
    """Drop a runner's model and caches, and what vLLM keeps of the model for the process."""
    runner.compilation_config.static_forward_context.clear()
    if getattr(runner, "model", None) is not None:
        forget_compiled(whole_model(runner))
    for holder in ("model", "drafter", "speculator"):  # the drafter's holder by model runner
        if hasattr(runner, holder):
            setattr(runner, holder, None)
    runner.kv_caches.clear()
