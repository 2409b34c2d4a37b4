"""Imports of an emulated device's worker, made before the choice of the device."""

from __future__ import annotations

import importlib

from gpupoold.worker.environment import set_engine_environment


def preload(log_level: str) -> None:
    """Import the engine; device, model and threads are chosen later."""
    set_engine_environment(log_level)
    for name in ("calls", "engine.emulated_worker", "engine.scheduler"):
        importlib.import_module(f"gpupoold.worker.{name}")
