"""Facts about a machine from which budgets are worked out. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """A configured device.

    ``memory_bytes`` is None if unknown. ``node`` is the NUMA node of a GPU, None if the
    kernel names none, and for other devices.
    """

    kind: str
    memory_bytes: int | None
    node: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """Host memory and devices, in the order of the configuration.

    ``memory_bytes`` excludes reserved huge pages. ``limit_bytes`` is the limit of the daemon's
    control group, None without a limit. ``node_bytes`` is the memory of NUMA nodes by number.
    """

    memory_bytes: int
    devices: tuple[DeviceFacts, ...]
    limit_bytes: int | None = None
    node_bytes: Mapping[int, int] = field(default_factory=dict)
    is_simulated: bool = False

    @property
    def usable_bytes(self) -> int:
        """Bytes that the daemon and its processes may use."""
        return min(self.memory_bytes, self.limit_bytes or self.memory_bytes)
