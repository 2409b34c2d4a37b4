"""Environment variables of vLLM and torch."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from gpupoold.errors import Failed

ENGINE_ARGUMENTS = "GPUPOOL_ENGINE_ARGUMENTS"


def set_engine_environment(log_level: str) -> None:
    """Prepare ``os.environ``; before vLLM is imported, or again after a fork."""
    # On a GPU vLLM samples with FlashInfer unless told not to, and fails at the first model
    # where it is not installed. Its Triton kernel does the same.
    if importlib.util.find_spec("flashinfer") is None:
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # Its records go to the process's own handler, which replaces control characters.
        VLLM_CONFIGURE_LOGGING="0",
        VLLM_LOGGING_LEVEL=log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )
    # vLLM turns these graphs on by itself for some models when it sees their configuration. But
    # its attention reads the setting when it is imported: turned on later, graphs would have
    # attention in them, with the batch that they were captured with.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    # Never reached: ``grammars.py`` bounds these caches, for all engines of the process together.
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = "4096"
    # Read when vLLM is imported; it may have been, by a process that meant another level.
    logging.getLogger("vllm").setLevel(log_level.upper())


def engine_arguments(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return further arguments of vLLM's engines, for tests and benchmarks.

    The variable ``GPUPOOL_ENGINE_ARGUMENTS`` has a JSON object such as ``{"max_num_seqs": 16}``.

    Raises:
        Failed: the value is no JSON object.
    """
    text = environment.get(ENGINE_ARGUMENTS, "{}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise Failed(f"${ENGINE_ARGUMENTS} is no JSON: {error}", f"it is {text!r}") from error
    if not isinstance(arguments, dict):
        raise Failed(f"${ENGINE_ARGUMENTS} is no JSON object", f"it is {text!r}")
    return arguments
