"""Checks of GPUs, memory, limits, disks and the kernel. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpupoold.config.schema import Settings
from gpupoold.doctor.check import Check, fault, ok, warning
from gpupoold.doctor.facts import (
    DaemonFacts,
    Folder,
    GpuFacts,
    KernelFacts,
    LimitFacts,
    MemoryFacts,
    NumaFacts,
    VersionFacts,
)
from gpupoold.system.folders import is_shared
from gpupoold.units import format_bytes

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
_FIRST_KERNEL = {
    "memfd": "3.17",
    "pidfd": "5.3",
    "moving pages": "5.13",
}


def check_gpus(
    gpu: GpuFacts, settings: Settings, versions: VersionFacts, daemon: DaemonFacts
) -> Iterator[Check]:
    """Check the driver, and each GPU that the configuration names."""
    indices = [index for one in settings.devices for index in one.gpus]
    if not indices:
        kinds = sorted({one.kind for one in settings.devices})
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
    elif memory.shared_huge_pages == "never" and "cuda" in kinds:
        text = "shared memory has pages of 4 KiB only, which makes pinning slow"
        fix = "echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
        yield warning("huge pages", text, fix)
    else:
        mode = memory.transparent_huge_pages or "not supported"
        yield ok("huge pages", f"none reserved; transparent huge pages: {mode}")


def check_numa(numa: NumaFacts, kinds: set[str]) -> Iterator[Check]:
    """Check that threads can allocate host memory near a GPU."""
    if numa.num_nodes < 2:
        yield ok("numa", "one node")
        return
    found = f"{numa.num_nodes} nodes"
    if "cuda" in kinds and numa.problem:
        fix = "allow set_mempolicy in the container or service (SystemCallFilter=, seccomp)"
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
        text = f"at most {format_bytes(locked)}{of}; {format_bytes(pinned_bytes)} are to be pinned"
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else f"at most {limit}"
