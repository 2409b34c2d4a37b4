"""The environment of vLLM alone. Imports nothing, as some programs import no part of gpupool."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Engines in the process that asks for them, with one thread, and no words but errors."""
