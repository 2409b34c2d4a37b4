"""What a worker of an emulated device imports, before it is known which."""

from __future__ import annotations

import importlib

from gpupoold.worker.environment import set_engine_environment


def preload(log_level: str) -> None:
    """Import the engine; device, model and threads are chosen later."""
    set_engine_environment(log_level)
    for name in ("calls", "engine.emulated_worker", "engine.scheduler"):
        importlib.import_module(f"gpupoold.worker.{name}")
