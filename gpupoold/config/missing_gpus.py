"""GPUs that were expected, or are configured, and are not there."""

from __future__ import annotations

import os

from gpupoold.config import schema
from gpupoold.config.file import ConfigFile
from gpupoold.config.machine import Machine
from gpupoold.config.unusable_gpus import unusable_gpu
from gpupoold.engine_versions import is_built_for_gpus
from gpupoold.errors import Failed


def check_gpus_found(file: ConfigFile, machine: Machine) -> None:
    """Check that the GPUs which a daemon's file or engine ask for are there.

    Raises:
        Failed: a GPU is missing. The driver may be loaded later, so another start may succeed.
    """
    problem, fix = missing_gpus(file)
    if problem:
        raise Failed(problem, fix)
    unusable = unusable_gpu(machine)
    if unusable is not None:
        raise Failed(unusable.message, unusable.hint)


def missing_gpus(file: ConfigFile) -> tuple[str, str]:
    """Return why GPUs were expected and not found, and a remedy; empty texts if all is well."""
    has_devices = any(key.startswith("device[") for key in file.written)
    has_gpus = any(device.kind == "cuda" for device in file.settings.devices)
    if has_devices or has_gpus or not is_built_for_gpus():
        return "", ""
    expected = "vLLM is built for GPUs, and the configuration names no devices"
    if schema.NVIDIA_GPUS.is_dir() and any(schema.NVIDIA_GPUS.iterdir()):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        problem = f"CUDA_VISIBLE_DEVICES is {hidden!r}, so no GPU is visible; {expected}"
        return problem, "unset the variable, or write devices into the configuration"
    problem = f"no NVIDIA GPU was found (no entry in {schema.NVIDIA_GPUS}); {expected}"
    return problem, (
        "check the driver with nvidia-smi, and load it: modprobe nvidia. Under WSL write "
        "'devices = [\"cuda:0\"]' into the configuration. To run without a GPU: "
        "make venv GPUPOOL_DEVICE=cpu"
    )
