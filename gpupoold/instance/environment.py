"""The process environment that vLLM and torch read."""

from __future__ import annotations

import importlib.util
import logging
import os


def set_engine_environment(log_level: str) -> None:
    """Prepare ``os.environ``; before vLLM is imported, or again after a fork."""
    # On a GPU vLLM samples with FlashInfer unless told not to, and fails at the first model
    # where it is not installed. Its Triton kernel does the same.
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )
    # Read when vLLM is imported; it may have been, by a process that meant another level.
    logging.getLogger("vllm").setLevel(log_level.upper())
