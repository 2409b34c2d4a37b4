"""What the doctor looks at. Plain data: ``probes`` find it, ``checks`` judge it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gpupoold.config.schema import Settings


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML tells of it; bytes are those of all processes on it."""

    name: str
    memory_bytes: int
    used_bytes: int
    is_mig: bool = False
    is_persistent: bool = True


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """``problem``: why NVML cannot be asked, empty if it can. ``cuda``: the newest version that
    the driver supports."""

    problem: str = ""
    driver: str = ""
    cuda: tuple[int, int] = (0, 0)
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """``limit_bytes``: what a control group allows, None for no limit. ``huge_bytes`` are set
    aside for explicit huge pages. ``overcommit``: of the kernel's three modes."""

    total_bytes: int
    available_bytes: int
    limit_bytes: int | None = None
    huge_bytes: int = 0
    overcommit: int = 0
    transparent_huge_pages: str = ""


@dataclass(frozen=True, slots=True)
class NumaFacts:
    """``problem``: why a thread cannot choose its node, empty if it can."""

    num_nodes: int = 1
    is_balancing: bool = False
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LimitFacts:
    """Soft limits, None for unlimited. ``of`` is whose they are."""

    of: str
    open_files: int | None
    processes: int | None
    locked_bytes: int | None


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder of the configuration; one that is missing is told of by where it would be made.

    ``owner`` is the user's number. ``num_bytes`` is what is in it, where that was asked.
    """

    key: str
    path: Path
    exists: bool
    is_writable: bool
    owner: int
    filesystem: str
    free_bytes: int
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """``missing``: what was tried and does not work, by name, with the error."""

    release: str
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkFacts:
    """``problem``: why the public address cannot be listened on, empty if it can or is."""

    address: str
    problem: str = ""
    socket_path: Path = Path()


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """Installed versions, None where one is missing; ``needed`` by the same names."""

    python: str
    gpupool: str
    installed: dict[str, str | None]
    needed: dict[str, str]


@dataclass(frozen=True, slots=True)
class DatabaseFacts:
    """``problem``: what SQLite finds wrong with it, empty for nothing. ``schema`` 0: none yet."""

    path: Path
    schema: int = 0
    newest_schema: int = 0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class DaemonFacts:
    """``problem``: why no daemon answers, empty if one does; ``fix`` what to do about it.

    ``unsound`` is what its own check of its books found, ``failed`` are models with their errors,
    ``weight_bytes`` those of all models.
    """

    problem: str = ""
    fix: str = ""
    pid: int | None = None
    state: str = ""
    version: str = ""
    lost_rows: int = 0
    unsound: str = ""
    failed: dict[str, str] = field(default_factory=dict)
    weight_bytes: int = 0

    @property
    def is_running(self) -> bool:
        return not self.problem


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was found. ``settings`` None: the configuration cannot be used, for ``problem``,
    which ``fix`` mends; then what depends on it is missing."""

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
