"""The files of a wheel that go into the GPU bundle, and their paths in the unpacked folder."""

from __future__ import annotations

import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

# vLLM's compiled libraries that models on Hopper use: elementary and quantised kernels (Marlin,
# Machete, CUTLASS), mixtures of experts, FlashMLA, FlashAttention 3, and two small libraries that
# vLLM always imports. All use torch's stable ABI. Left out are FlashAttention 2 (before Hopper),
# QuTLASS (Blackwell) and DeepGEMM, which only loads under the torch that it was built with: FP8
# weights with scales for blocks use CUTLASS or Triton instead.
_VLLM_LIBRARIES = (
    "vllm/_C_stable_libtorch.*",
    "vllm/_moe_C_stable_libtorch.*",
    "vllm/_flashmla_C.*",
    "vllm/_flashmla_extension_C.*",
    "vllm/vllm_flash_attn/_vllm_fa3_C.*",
    "vllm/cumem_allocator.*",
    "vllm/spinloop.*",
)
_LEFT_OUT = (
    "vllm/vllm-rs",  # vLLM's other HTTP front end, a program of 59 MB
    "vllm/third_party/deep_gemm/*",  # sources for kernels of fp8 models
    "vllm/third_party/fmha_sm100/*",  # sources for kernels of Blackwell GPUs
    "mistral_common/data/*",  # tokenizers of Mistral's own models
    "pycountry/locales/*",  # translations
)
_LIBRARY = "*.so"
# Importable parts of a wheel's ``NAME.data`` folder; other parts are scripts and headers.
_IMPORTABLE = ("purelib", "platlib")


@dataclass(frozen=True, slots=True)
class Member:
    """One file of a wheel that goes into the bundle."""

    wheel: Path
    name: str
    path: str
    num_bytes: int
    is_executable: bool


def is_kept(path: str) -> bool:
    """Return whether a file of a package, by its path below site-packages, goes into the bundle."""
    if any(fnmatchcase(path, pattern) for pattern in _LEFT_OUT):
        return False
    if path.startswith("vllm/") and fnmatchcase(path, _LIBRARY):
        return any(fnmatchcase(path, pattern) for pattern in _VLLM_LIBRARIES)
    return True


def installed_path(name: str) -> str | None:
    """Where a wheel's file lies below site-packages; None if it is not importable."""
    top, _, rest = name.partition("/")
    if not top.endswith(".data"):
        return name
    kind, _, path = rest.partition("/")
    return path if kind in _IMPORTABLE else None


def members(wheel: Path) -> Iterator[Member]:
    """The files of a wheel that go into the bundle.

    Raises:
        zipfile.BadZipFile: it is no wheel.
    """
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = installed_path(info.filename)
            if info.is_dir() or path is None or not is_kept(path):
                continue
            is_executable = bool(info.external_attr >> 16 & stat.S_IXUSR)
            yield Member(wheel, info.filename, path, info.file_size, is_executable)
