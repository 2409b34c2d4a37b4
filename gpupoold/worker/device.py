"""Opening the device that a worker was told to own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable

import torch
from vllm.platforms import current_platform

from gpupoold.errors import Failed
from gpupoold.memory.contracts import Device
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.units import format_bytes

# Kernels are loaded when they are first used, and libraries keep workspaces of their own.
_LIBRARIES_BYTES = 1 << 30
# Replaces torch's streams and events by some that do nothing, for vLLM's CPU worker.
_NO_STREAMS = "vllm.v1.worker.cpu.shm"


def open_device(kind: str, device_bytes: int, reserve_bytes: int, page_bytes: int) -> Device:
    """The device; a GPU is the only one this process sees.

    Raises:
        Failed: there is no such device, or vLLM was built for another kind.
        CudaError: the driver refused something.
        OSError: the host has too little memory for an emulated device.
    """
    if kind == "emulated":
        return EmulatedDevice(device_bytes, page_bytes or None)
    if not current_platform.is_cuda():
        raise Failed("the installed vLLM is not its CUDA build", "pip install gpupool[cuda]")
    if _NO_STREAMS in sys.modules:
        raise Failed(f"{_NO_STREAMS} is imported: torch has no CUDA streams", "this is a bug")
    return CudaDevice(
        0, device_bytes, reserve_bytes, page_bytes or None, compute_streams=compute_streams
    )


class DriverMemory:
    """What the driver has free beside the pages, against what torch has taken since the start.

    It knows the GPU as a whole: where other processes use it too, that says nothing.
    """

    def __init__(
        self,
        device: Device,
        torch_bytes: Callable[[], int] = torch.cuda.memory_reserved,
        *,
        has_gpu_alone: bool = True,
    ) -> None:
        self._device = device
        self._has_gpu_alone = has_gpu_alone
        self._torch_bytes = torch_bytes
        self._before = self._free_or_torchs()

    def check(self) -> dict[str, int]:
        """The bytes that neither pages nor torch account for; nothing on emulated devices and
        on GPUs that are shared.

        Raises:
            AssertionError: they are more than kernels and libraries take for themselves.
        """
        now = self._free_or_torchs()
        if now is None or self._before is None:
            return {}
        unaccounted = self._before - now
        assert unaccounted <= _LIBRARIES_BYTES, (
            f"{format_bytes(unaccounted)} of device memory are gone that neither pages nor "
            "torch account for"
        )
        return {"unaccounted_bytes": unaccounted}

    def _free_or_torchs(self) -> int | None:
        free_bytes = self._device.free_bytes() if self._has_gpu_alone else None
        return None if free_bytes is None else free_bytes + self._torch_bytes()


def device_name(kind: str) -> str:
    """What makes two devices equally fast: the GPU's name, or how many cores play one."""
    if kind == "emulated":
        return f"CPU x {torch.get_num_threads()}"
    return str(torch.cuda.get_device_name(0))


def compute_streams() -> Iterable[int]:
    """Streams with kernels of engines: vLLM sets one of its own, but starts on the default."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return {torch.cuda.default_stream().cuda_stream, torch.cuda.current_stream().cuda_stream}
