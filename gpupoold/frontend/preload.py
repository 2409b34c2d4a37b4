"""Imports of a frontend."""

from __future__ import annotations

import importlib

from gpupoold.engine_versions import check_engine_version
from gpupoold.frontend.conversations import message_types
from gpupoold.frontend.environment import set_engine_environment


def preload(log_level: str) -> None:
    """Import vLLM's HTTP layer.

    Raises:
        Failed: vLLM is missing, or has another version.
    """
    check_engine_version()
    set_engine_environment(log_level)
    importlib.import_module("gpupoold.frontend.adapter")
    message_types()  # takes 60 ms
