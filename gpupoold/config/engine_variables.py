"""The variables of vLLM that workers and frontends may inherit from the daemon.

vLLM has some 200 variables. Some add endpoints, log answers or refuse every request, so only a
variable known to be harmless reaches the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Set

PREFIX = "VLLM_"

KNOWN_VARIABLES = frozenset(
    {
        "VLLM_BATCH_INVARIANT",
        "VLLM_CACHE_ROOT",
        "VLLM_CPU_KVCACHE_SPACE",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_KV_CACHE_LAYOUT",
        "VLLM_LOGGING_LEVEL",
        "VLLM_NO_USAGE_STATS",
        "VLLM_TARGET_DEVICE",
        "VLLM_USE_BREAKABLE_CUDAGRAPH",
        "VLLM_USE_FLASHINFER_SAMPLER",
    }
)
"""Variables for caches and kernels, and variables set by gpupool."""


def drop_unlisted(environment: MutableMapping[str, str], listed: Iterable[str] = ()) -> list[str]:
    """Remove vLLM's variables from ``environment``, except known and ``listed`` variables.

    Return the removed names, sorted.
    """
    kept = KNOWN_VARIABLES.union(listed)
    dropped = sorted(name for name in environment if name.startswith(PREFIX) and name not in kept)
    for name in dropped:
        del environment[name]
    return dropped


def set_platform(environment: MutableMapping[str, str], kinds: Set[str]) -> None:
    """Let vLLM's API layer run without a GPU if all devices are simulated.

    Without the variable vLLM's build for CUDA finds no platform on a machine without a GPU.
    """
    if kinds == {"sim"}:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
