"""Tensors over memory that is not torch's."""

from __future__ import annotations

import ctypes

import torch

from gpupoold.memory.contracts import Device


class _CudaArray:
    """The array interface by which torch takes a device pointer without owning it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|i1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


def over(device: Device, address: int, num_bytes: int) -> torch.Tensor:
    """An int8 tensor of ``num_bytes`` at a device address; the memory may be unmapped yet."""
    if device.is_host_addressable:
        buffer = (ctypes.c_int8 * num_bytes).from_address(address)
        return torch.frombuffer(buffer, dtype=torch.int8)
    return torch.as_tensor(_CudaArray(address, num_bytes), device="cuda")


def host_bytes(address: int, num_bytes: int) -> torch.Tensor:
    """An int8 tensor over host memory."""
    return torch.frombuffer((ctypes.c_int8 * num_bytes).from_address(address), dtype=torch.int8)
