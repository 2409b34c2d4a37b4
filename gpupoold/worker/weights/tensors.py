"""Tensors over memory that torch does not own."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from gpupoold.memory.contracts import Device


def over(device: Device, address: int, num_bytes: int) -> torch.Tensor:
    """Return an int8 tensor at a device address, whose pages may be mapped later."""
    if device.is_host_addressable:
        buffer = (ctypes.c_int8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)
    return at_pointer(address, num_bytes, torch.device("cuda", torch.cuda.current_device()))


def spoil(device: Device, address: int, num_bytes: int) -> None:
    """Overwrite bytes, after the kernels launched before; floating-point numbers become NaN."""
    over(device, address, num_bytes).fill_(-1)


def at_pointer(address: int, num_bytes: int, device: torch.device) -> torch.Tensor:
    """Return an int8 tensor over memory of ``device``, without ownership.

    Array interface and DLPack query CUDA about the pointer, which fails for addresses without
    pages; so a storage is made from the pointer directly.
    """
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return torch.empty(0, dtype=torch.int8, device=device).set_(storage)


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """Return an int8 tensor over host memory."""
    return torch.frombuffer((ctypes.c_int8 * num_bytes).from_address(address), dtype=torch.int8)
