"""Facts about a machine from which budgets are worked out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpupoold.errors import ConfigError


class MachineError(ConfigError):
    """Settings that the machine cannot have; ``key`` is the key to change."""

    def __init__(self, key: str, what: str, hint: str) -> None:
        super().__init__(f"{key}: {what}", hint)
        self.key = key
        self.what = what


@dataclass(frozen=True, slots=True)
class DeviceFacts:
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
    devices: tuple[DeviceFacts, ...]
    limit_bytes: int | None = None
    node_bytes: Mapping[int, int] = field(default_factory=dict)
    is_simulated: bool = False
    has_cuda_engine: bool = True

    @property
    def usable_bytes(self) -> int:
        """Bytes that the daemon and its processes may use."""
        return min(self.memory_bytes, self.limit_bytes or self.memory_bytes)
