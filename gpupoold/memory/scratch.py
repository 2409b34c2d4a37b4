"""Device pages and host memory to measure copies with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from gpupoold.memory.address_ranges import AddressRange
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.pages import PagePool


@dataclass(frozen=True, slots=True)
class Scratch:
    """An address range of a device and a pinned host buffer of the same size."""

    address_range: AddressRange
    buffer: HostBuffer
    num_bytes: int

    @property
    def address(self) -> int:
        return self.address_range.address

    @property
    def host_address(self) -> int:
        return self.buffer.address


@contextmanager
def scratch_memory(
    device: Device, pool: PagePool, num_bytes: int, *, is_mapped: bool = True
) -> Iterator[Scratch]:
    """Allocate ``num_bytes`` of device memory and of pinned host memory until the context ends.

    All pages are touched before. If ``is_mapped`` is false, the address range has no pages.

    Raises:
        OutOfPages: the device has fewer free pages.
        OSError: the host has too little memory.
        CudaError: a call of the driver failed.
    """
    num_pages = -(-num_bytes // device.page_bytes)
    with ExitStack() as undo:
        address_range = AddressRange(device, pool, num_pages)
        undo.callback(address_range.close)
        if is_mapped:
            address_range.retain(range(num_pages))
        buffer = HostBuffer.create("gpupool-scratch", num_pages * device.page_bytes)
        undo.callback(buffer.close)
        device.pin(buffer.address, buffer.num_bytes)
        undo.callback(device.unpin, buffer.address, buffer.num_bytes)
        device.synchronize()
        yield Scratch(address_range, buffer, num_bytes)
