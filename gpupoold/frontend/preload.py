"""Imports of a frontend."""

from __future__ import annotations

import importlib
import logging
import os

from gpupoold.engine_versions import check_engine_version
from gpupoold.frontend.body import MAX_PROMPTS, MAX_SAMPLES
from gpupoold.frontend.conversations import message_types

# vLLM's info records contain each model's whole configuration: a level for debugging here.
_ENGINE_LOG_LEVELS = {"debug": "INFO", "info": "WARNING", "warning": "WARNING", "error": "ERROR"}

_ALWAYS = {
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    # vLLM's records go to the process's own handler, which replaces control characters.
    "VLLM_CONFIGURE_LOGGING": "0",
    # These two would add endpoints that no client may reach.
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    # Media are fetched only from the hosts of security.media_hosts, see rendering.py.
    "VLLM_MEDIA_CONNECTOR": "gpupool",
    "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
    "VLLM_MEDIA_FETCH_MAX_RETRIES": "1",
    # The frontend has checked both bounds before; vLLM's defaults are for whole machines.
    "VLLM_MAX_N_SEQUENCES": str(MAX_SAMPLES),
    "VLLM_MAX_COMPLETION_PROMPTS": str(MAX_PROMPTS),
}


def preload(log_level: str) -> None:
    """Import vLLM's HTTP layer. Raises Failed: vLLM is missing, or has another version."""
    check_engine_version()
    set_engine_environment(log_level)
    importlib.import_module("gpupoold.frontend.adapter")
    message_types()  # takes 60 ms


def set_engine_environment(log_level: str) -> None:
    """Prepare ``os.environ`` for vLLM; to be called before importing the adapter."""
    os.environ.update(_ALWAYS)
    engine_level = _ENGINE_LOG_LEVELS.get(log_level.lower(), "WARNING")
    os.environ["VLLM_LOGGING_LEVEL"] = engine_level
    logging.getLogger("vllm").setLevel(engine_level)
    # No KV cache is ever allocated here; without a value vLLM measures the machine's memory.
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
