"""What an instance of an emulated device imports, before it is known which."""

from __future__ import annotations

import importlib

from gpupoold.worker.environment import set_engine_environment


def preload(log_level: str) -> None:
    """Import the engine; device, model and threads are chosen later."""
    set_engine_environment(log_level)
    for name in ("engine", "residency", "turn_loop", "emulated_worker", "scheduler"):
        importlib.import_module(f"gpupoold.worker.{name}")
