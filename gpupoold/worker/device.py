"""Opening of the worker's device."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from vllm.platforms import current_platform

from gpupoold.errors import Failed
from gpupoold.latency.shape import group_name
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import Device
from gpupoold.memory.emulated import EmulatedDevice, ModelledDriver
from gpupoold.memory.pinning import IdleLock
from gpupoold.system.nvml import GpuUse, gpu_use
from gpupoold.system.process import trim_heap
from gpupoold.units import format_bytes
from gpupoold.wire.messages import EngineMemory

# Allowance for kernels, which are loaded on first use, and for workspaces of libraries.
_LIBRARIES_BYTES = 1 << 30
# Allowance for an engine's graphs where the memory of this process is not known.
_GRAPHS_BYTES = 150 << 20
# A module of vLLM's CPU worker, which replaces torch's streams and events by dummies.
_NO_STREAMS = "vllm.v1.worker.cpu.shm"


def open_device(
    kind: str,
    device_bytes: int,
    reserve_bytes: int,
    page_bytes: int,
    rank: int = 0,
    link_bytes_per_s: int = 0,
    pin_bytes_per_s: int = 0,
    pinned_limit_bytes: int = -1,
    locks: Path | None = None,
) -> Device:
    """Open the device: of the visible GPUs, the one of this rank.

    ``link_bytes_per_s``, ``pin_bytes_per_s`` and ``pinned_limit_bytes``, 0 or -1 for none, are for
    an emulated device, see :class:`EmulatedDevice`. ``locks`` is the folder of the files that all
    workers lock.

    Raises:
        Failed: the kind of device is missing, or vLLM was built for another kind.
        CudaError: a call of the driver failed.
        OSError: the host has too little memory for an emulated device.
    """

    def lock(name: str) -> Path | None:
        return None if locks is None else locks / name

    if kind == "emulated":
        sizes = device_bytes, page_bytes or None, link_bytes_per_s
        if not pin_bytes_per_s:
            return EmulatedDevice(*sizes)
        driver = ModelledDriver(pin_bytes_per_s, pinned_limit_bytes, lock("driver.lock"))
        return EmulatedDevice(*sizes, driver, IdleLock(lock("pinning.lock")))
    if not current_platform.is_cuda():
        raise Failed("the installed vLLM was not built for CUDA", "pip install gpupool[cuda]")
    if _NO_STREAMS in sys.modules:
        raise Failed(f"{_NO_STREAMS} is imported: torch has no CUDA streams", "this is a bug")
    return CudaDevice(
        rank,
        device_bytes,
        reserve_bytes,
        page_bytes or None,
        compute_streams=compute_streams,
        idle=IdleLock(lock("pinning.lock")),
    )


class OutsidePages(NamedTuple):
    """Bytes in use outside the pages.

    ``own_bytes`` are this process's bytes, with the pages, None if not known; ``free_bytes`` are
    free, None if another process uses the device too. ``torch_bytes`` are torch's allocations,
    ``private_bytes`` is private memory of the process, with torch's pinned memory.
    """

    own_bytes: int | None
    free_bytes: int | None
    torch_bytes: int
    private_bytes: int

    def device_bytes_since(self, before: OutsidePages) -> int | None:
        """Return by how many bytes this process's use of the device has grown, None if not
        known.
        """
        if self.own_bytes is not None and before.own_bytes is not None:
            return self.own_bytes - before.own_bytes
        if self.free_bytes is not None and before.free_bytes is not None:
            return before.free_bytes - self.free_bytes
        return None


def torch_pinned_bytes() -> int:
    """Return the host memory that torch has pinned and uses."""
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


@dataclass(eq=False)
class DriverMemory:
    """This process's device memory beside the pages, against torch's allocations.

    NVML reports the memory of the process. Where NVML does not, the driver's free memory counts if
    no other process uses the GPU, else torch's allocations only. ``has_gpu_alone`` is false if
    another worker has the same GPU, and ``use_of`` returns the use of the GPU of a PCI address.
    ``pinned_bytes`` returns the host memory that torch has pinned, which the kernel does not count
    as the process's: an engine's table of the tokens of all sequences is pinned.
    """

    device: Device
    torch_bytes: Callable[[], int] = torch.cuda.memory_reserved
    has_gpu_alone: bool = field(default=True, kw_only=True)
    use_of: Callable[[str], GpuUse] = field(default=gpu_use, kw_only=True)
    pinned_bytes: Callable[[], int] = field(default=torch_pinned_bytes, kw_only=True)

    def __post_init__(self) -> None:
        self._before = self.outside_pages()

    def check(self) -> dict[str, int]:
        """Return the bytes that neither pages nor torch account for.

        Empty on emulated devices, and on shared GPUs without the memory of each process.

        Raises:
            AssertionError: the bytes exceed what kernels and libraries take.
        """
        if self.device.free_bytes() is None:
            return {}
        now = self.outside_pages()
        grown = now.device_bytes_since(self._before)
        if grown is None:
            return {}
        unaccounted = grown - (now.torch_bytes - self._before.torch_bytes)
        assert unaccounted <= _LIBRARIES_BYTES, (
            f"{format_bytes(unaccounted)} of device memory is in use that neither pages nor "
            "torch account for"
        )
        return {"unaccounted_bytes": unaccounted}

    def outside_pages(self) -> OutsidePages:
        """Return the bytes in use now, for :meth:`taken_since`.

        An emulated device's memory outside the pages is private memory of the process.
        """
        free_bytes = self.device.free_bytes()
        if free_bytes is None:
            trim_heap()  # free memory of the allocator does not count
            private_bytes = _private_bytes()
            return OutsidePages(private_bytes, None, 0, private_bytes)
        use = self.use_of(self.device.pci_bus_id)
        if not self.has_gpu_alone or use.num_processes > 1:
            free_bytes = None
        private_bytes = _private_bytes() + self.pinned_bytes()
        return OutsidePages(use.own_bytes, free_bytes, self.torch_bytes(), private_bytes)

    def taken_since(self, before: OutsidePages) -> EngineMemory:
        """Return the memory taken since ``before``, for example by the load of an engine."""
        return _difference(before, self.outside_pages())

    def freed_since(self, before: OutsidePages) -> EngineMemory:
        """Return the memory given back since ``before``, for example by the end of an engine."""
        return _difference(self.outside_pages(), before)


def _difference(less: OutsidePages, more: OutsidePages) -> EngineMemory:
    device_bytes = more.device_bytes_since(less)
    if device_bytes is None:
        device_bytes = more.torch_bytes - less.torch_bytes + _GRAPHS_BYTES
    return EngineMemory(max(0, device_bytes), max(0, more.private_bytes - less.private_bytes))


def _private_bytes() -> int:
    """Return the resident private memory of this process; shared memory does not count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return 0


def device_name(kind: str, num_ranks: int = 1) -> str:
    """Return a name that equally fast devices share: the GPU's name, or the number of cores.

    A group's name begins with the number of its GPUs.
    """
    is_emulated = kind == "emulated"
    name = f"CPU x {torch.get_num_threads()}" if is_emulated else torch.cuda.get_device_name(0)
    return group_name(num_ranks, str(name))


def compute_streams() -> Iterable[int]:
    """Return the streams of engines' kernels: vLLM's current and, for its start, the default."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return {torch.cuda.default_stream().cuda_stream, torch.cuda.current_stream().cuda_stream}
