"""Facts about a machine, and checks of configured GPUs against the facts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby

from gpupoold.errors import SettingError
from gpupoold.units import format_bytes

_NO_GPU = 'to run without a GPU write: devices = ["emulated"]'
_FOR_GPUS = "make venv GPUPOOL_DEVICE=cuda in a clone, pip install 'gpupool[cuda]' otherwise"


@dataclass(frozen=True, slots=True)
class MachineDevice:
    """A GPU, real or not, of the configured device with number ``device``.

    ``memory_bytes`` is None if unknown. ``node`` is the NUMA node of a GPU, None if the
    kernel names none, and for other devices. ``name`` is the kind of GPU as the driver spells it,
    empty if unknown. ``ordinal`` is the GPU of a CUDA device; ``is_missing`` is true if there is no
    driver, or the driver has no such GPU.
    """

    kind: str
    memory_bytes: int | None
    node: int | None = None
    device: int = 0
    name: str = ""
    ordinal: int | None = None
    is_missing: bool = False


@dataclass(frozen=True, slots=True)
class Machine:
    """Host memory, and the GPUs of all devices in the order of the configuration.

    ``memory_bytes`` excludes reserved huge pages. ``limit_bytes`` is the limit of the daemon's
    control group, None without a limit. ``node_bytes`` is the memory of NUMA nodes by number.
    ``has_cuda_engine`` is false if the installed vLLM is a build for CPUs.
    """

    memory_bytes: int
    devices: tuple[MachineDevice, ...]
    limit_bytes: int | None = None
    node_bytes: Mapping[int, int] = field(default_factory=dict)
    is_simulated: bool = False
    has_cuda_engine: bool = True

    @property
    def usable_bytes(self) -> int:
        return min(self.memory_bytes, self.limit_bytes or self.memory_bytes)


def unusable_gpu(machine: Machine) -> SettingError | None:
    """Return why a configured CUDA device cannot be used, None if all can."""
    gpus = [device for device in machine.devices if device.kind == "cuda"]
    missing = next((gpu for gpu in gpus if gpu.is_missing), None)
    if gpus and not machine.has_cuda_engine:
        what = "is a CUDA device, and the installed vLLM is built for CPUs only"
        hint = f"install the build for GPUs ({_FOR_GPUS}); {_NO_GPU}"
        return SettingError(f"device[{gpus[0].device}]", what, hint)
    if missing is not None:
        what = f"there is no GPU {missing.ordinal}"
        hint = f"name GPUs that `nvidia-smi -L` lists; if it fails, install the driver; {_NO_GPU}"
        is_group = sum(gpu.device == missing.device for gpu in gpus) > 1
        key = f"device[{missing.device}]{'.gpus' * is_group}"
        return SettingError(key, what, hint)
    return None


def check_groups(devices: Iterable[MachineDevice]) -> None:
    """Check that the GPUs of each group are there, and are alike.

    Each GPU holds an equal part of a model, so the smallest and slowest sets the size and the pace.
    Facts that are unknown agree with all.
    """
    for number, members in groupby(devices, key=lambda device: device.device):
        group = list(members)
        if len(group) > 1:
            _check_group(f"device[{number}].gpus", group)


def _check_group(key: str, group: list[MachineDevice]) -> None:
    for device in group:
        if device.is_missing:
            raise SettingError(
                key, f"there is no GPU {device.ordinal}", "name GPUs that `nvidia-smi -L` lists"
            )
    first = group[0]
    for device in group[1:]:
        if device.name != first.name and device.name and first.name:
            what = f"GPU {first.ordinal} is {first.name}, and GPU {device.ordinal} is {device.name}"
        elif (
            device.memory_bytes != first.memory_bytes and device.memory_bytes and first.memory_bytes
        ):
            what = (
                f"GPU {first.ordinal} has {format_bytes(first.memory_bytes)}, and GPU "
                f"{device.ordinal} has {format_bytes(device.memory_bytes)}"
            )
        else:
            continue
        raise SettingError(key, f"{what}: the GPUs of a group must be alike", "group like GPUs")


def visible_entry(index: int, environment: Mapping[str, str]) -> str | None:
    """Return NVML's index or (the beginning of) a UUID for the CUDA device ``index``. Pure.

    Returns None if ``CUDA_VISIBLE_DEVICES`` has no such device.
    """
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return str(index)
    entries = [entry.strip() for entry in visible.split(",") if entry.strip()]
    return entries[index] if index < len(entries) else None
