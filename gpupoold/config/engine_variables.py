"""The variables of vLLM that the daemon's environment may pass to workers and frontends.

vLLM has some 200 of them. Some add endpoints, log answers or refuse every request, so a variable
of the operator's shell or environment file reaches the engine only if it is known to be harmless.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping

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
"""Where vLLM caches and how it computes; what gpupool sets itself in any case is harmless too."""


def drop_unlisted(environment: MutableMapping[str, str], listed: Iterable[str] = ()) -> list[str]:
    """Remove vLLM's variables from ``environment``, but for those known or ``listed``.

    Returns:
        The names of those removed, in order.
    """
    kept = KNOWN_VARIABLES.union(listed)
    dropped = sorted(name for name in environment if name.startswith(PREFIX) and name not in kept)
    for name in dropped:
        del environment[name]
    return dropped
