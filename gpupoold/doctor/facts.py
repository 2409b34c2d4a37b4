"""Facts about the machine as plain data, found by ``probes`` and read by ``checks``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from gpupoold.config.schema import Settings
from gpupoold.domain import Folder


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as NVML reports it; bytes include all processes on the GPU.

    ``node`` is the NUMA node, None if the kernel names none. ``has_display``: programs draw there.
    """

    name: str
    memory_bytes: int
    used_bytes: int
    is_mig: bool = False
    is_persistent: bool = True
    uuid: str = ""
    node: int | None = None
    has_display: bool = False


class PciPath(IntEnum):
    """The way between two GPUs over PCIe, the longest last; the values are NVML's."""

    BOARD = 0
    SWITCH = 10
    SWITCHES = 20
    HOST_BRIDGE = 30
    NODE = 40
    SOCKETS = 50


@dataclass(frozen=True, slots=True)
class GpuLink:
    """The connection of the GPUs ``first`` and ``second``, NVML's indexes with the smaller first.

    ``num_nvlinks`` counts active NVLinks between both, or of the GPU with fewer links to NVSwitches
    (``is_switched``). ``path`` is None if NVML does not tell.
    """

    first: int
    second: int
    num_nvlinks: int = 0
    is_switched: bool = False
    path: PciPath | None = None


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """The driver and the GPUs.

    ``problem`` is the reason why NVML cannot be used, empty if NVML works. ``cuda`` is the newest
    CUDA version supported by the driver. ``links`` connect each two GPUs. ``has_none`` is true if
    CUDA can have no GPU here: NVML lists none, or neither NVML nor CUDA's driver library is there.
    """

    problem: str = ""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()
    links: tuple[GpuLink, ...] = ()
    has_none: bool = False

    def link(self, one: int, other: int) -> GpuLink | None:
        """Return the connection of two GPUs, None if unknown."""
        wanted = min(one, other), max(one, other)
        return next((link for link in self.links if (link.first, link.second) == wanted), None)


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Host memory.

    ``limit_bytes`` is the control group's limit, None for no limit. ``huge_bytes`` is reserved for
    explicit huge pages and unused. ``overcommit`` is the kernel's mode (0, 1 or 2).
    ``shared_huge_bytes`` of shared memory are in huge pages, ``shared_huge_pages`` is the mode.
    """

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    huge_bytes: int = 0
    overcommit: int = 0
    shared_huge_pages: str = ""
    shared_huge_bytes: int = 0


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """NUMA nodes; ``problem`` is the reason why memory cannot have a node, or empty.

    ``node_bytes`` is the memory of the nodes by number.
    """

    num_nodes: int = 1
    is_balancing: bool = False
    problem: str = ""
    node_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Soft limits of a process, named in ``of``; None means unlimited."""

    of: str
    open_files: int | None
    processes: int | None
    locked_bytes: int | None
    address_space_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """Kernel features; ``missing`` maps features that do not work to error messages."""

    release: str
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """The public address; ``problem`` is the reason why the daemon cannot listen, or empty."""

    address: str
    problem: str = ""
    socket_path: Path = Path()


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Versions of packages: ``installed`` (None if missing) and ``needed``.

    ``cuda`` is the CUDA version that torch is built for, None for a build without CUDA, or if torch
    is missing. ``lacking`` names programs and headers for compiling kernels that are not installed.
    """

    python: str
    gpupool: str
    installed: dict[str, str | None]
    needed: dict[str, str]
    cuda: tuple[int, int] | None = None
    lacking: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """The state database; ``problem`` is SQLite's error, or empty; ``schema`` is 0 without file."""

    path: Path
    schema: int = 0
    newest_schema: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """The running daemon; ``problem`` is the reason why no daemon answers, ``fix`` a remedy.

    ``unsound`` has the failures of the daemon's own check, ``failed`` maps failed models to errors,
    ``snapshot_bytes`` is the sum over the weights snapshots of all models.
    """

    problem: str = ""
    fix: str = ""
    pid: int | None = None
    state: str = ""
    version: str = ""
    http_url: str = ""
    lost_rows: int = 0
    unsound: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    snapshot_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Facts:
    """All facts.

    ``settings`` is None if the configuration cannot be used: then ``problem`` is the reason,
    ``fix`` a remedy, and facts that need the configuration are missing. ``missing_gpus`` is why
    GPUs were expected and not found, with a remedy; empty texts if all is well.
    """

    config_path: str
    problem: str
    fix: str
    settings: Settings | None
    gpu: GpuFacts
    memory: MemoryFacts
    numa: NumaFacts
    limits: LimitFacts
    kernel: KernelFacts
    versions: VersionFacts
    daemon: DaemonFacts
    folders: tuple[Folder, ...] = ()
    network: NetworkFacts | None = None
    database: DatabaseFacts | None = None
    missing_gpus: tuple[str, str] = ("", "")
