"""Environment variables of vLLM and torch, and the imports before the choice of a device."""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Mapping
from typing import Any

from gpupoold.errors import Failed

ENGINE_ARGUMENTS = "GPUPOOL_ENGINE_ARGUMENTS"


def set_engine_environment(log_level: str) -> None:
    """Prepare ``os.environ``, before vLLM is imported or again after a fork."""
    # FlashInfer compiles its sampler at the first request with top-p or top-k, which is after the
    # self-check, and needs nvcc, ninja and g++ on the PATH. vLLM's Triton kernel gives the same
    # results.
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        # vLLM's records go to the process's handler, which replaces control characters.
        VLLM_CONFIGURE_LOGGING="0",
        VLLM_LOGGING_LEVEL=log_level.upper(),
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        HF_HUB_OFFLINE="1",
    )
    # vLLM turns breakable graphs on for some models after reading the model's configuration. But
    # the attention module reads the setting at import, so graphs turned on later would contain
    # attention with the batch of the capture.
    os.environ.setdefault("VLLM_USE_BREAKABLE_CUDAGRAPH", "0")
    # Never reached: ``grammars.py`` bounds the caches of all engines of the process together.
    os.environ["VLLM_XGRAMMAR_CACHE_MB"] = "4096"
    # vLLM reads the level at import, perhaps before a fork, in a process with a different level.
    logging.getLogger("vllm").setLevel(log_level.upper())


def set_group_environment() -> None:
    """Turn off the all-reduces that depend on one model's sizes or graphs, unless set.

    To be called before the process groups are made.
    """
    # FlashInfer's workspace has the size of the first model of the process, and the creation is
    # collective, at the first step that needs the workspace.
    os.environ.setdefault("VLLM_ALLREDUCE_USE_FLASHINFER", "0")
    # NCCL registers the buffers of captured collectives with the peers, and forgets these at some
    # call after the graph's end. Meanwhile torch frees the memory, which the peers still map.
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def engine_arguments(environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Return further arguments of vLLM's engines, for tests and benchmarks.

    The variable ``GPUPOOL_ENGINE_ARGUMENTS`` has a JSON object such as ``{"max_num_seqs": 16}``.

    Raises:
        Failed: the value is not a JSON object.
    """
    text = environment.get(ENGINE_ARGUMENTS, "{}")
    try:
        arguments = json.loads(text)
    except ValueError as error:
        raise Failed(f"${ENGINE_ARGUMENTS} is not JSON: {error}", f"it is {text!r}") from error
    if not isinstance(arguments, dict):
        raise Failed(f"${ENGINE_ARGUMENTS} is not a JSON object", f"it is {text!r}")
    return arguments


def preload(log_level: str) -> None:
    """Import the engine; device, model and threads are chosen later."""
    set_engine_environment(log_level)
    for name in ("calls", "engine.emulated_worker", "engine.scheduler"):
        importlib.import_module(f"gpupoold.worker.{name}")
