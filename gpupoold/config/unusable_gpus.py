"""CUDA devices of the configuration that this machine cannot have. Pure."""

from __future__ import annotations

from gpupoold.config.machine import Machine, MachineError

_NO_GPU = 'to run without a GPU write: devices = ["emulated"]'
_FOR_GPUS = "make venv GPUPOOL_DEVICE=cuda in a clone, pip install 'gpupool[cuda]' otherwise"


def unusable_gpu(machine: Machine) -> MachineError | None:
    """Return why a configured CUDA device cannot be used, None if all can."""
    gpus = [one for one in machine.devices if one.kind == "cuda"]
    missing = next((one for one in gpus if one.is_missing), None)
    if gpus and not machine.has_cuda_engine:
        what = "is a CUDA device, and the installed vLLM is built for CPUs only"
        hint = f"install the build for GPUs ({_FOR_GPUS}); {_NO_GPU}"
        return MachineError(f"device[{gpus[0].device}]", what, hint)
    if missing is not None:
        what = f"there is no GPU {missing.ordinal}"
        hint = f"name GPUs that `nvidia-smi -L` lists; if it fails, install the driver; {_NO_GPU}"
        is_group = sum(one.device == missing.device for one in gpus) > 1
        key = f"device[{missing.device}]{'.gpus' * is_group}"
        return MachineError(key, what, hint)
    return None
