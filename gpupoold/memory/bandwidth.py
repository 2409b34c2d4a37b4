"""Bandwidth of a device's link to host memory, measured with the copy streams in use later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from gpupoold.memory.device import AddressRange, Copy, CopyStream, Device, Direction, cut
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import NO_NODE, node_bytes
from gpupoold.memory.pages import PagePool

# Takes 3 ms on a fast link, so the cost of starting a copy and waking a thread is negligible.
_PROBE_BYTES = 128 << 20
# Two pieces, of which the second is mapped during the copy of the first, as in a switch.
_FILL_PIECES = 2
_NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class LinkBandwidth:
    """Bytes per second of copies in one direction at a time, to the device and to the host."""

    in_bytes_per_s: float
    out_bytes_per_s: float


def measure_link(device: Device, pool: PagePool, num_bytes: int = _PROBE_BYTES) -> LinkBandwidth:
    """Copy ``num_bytes``, or as much as free pages allow, each way; return the best of three.

    Pages and pinned host memory are allocated before, so only the link is measured.

    Raises:
        OutOfPages: no page is free.
        OSError: the machine has too little memory.
        CudaError: a call of the driver failed.
    """
    num_pages = max(1, min(pool.num_free, num_bytes // device.page_bytes))
    with scratch_memory(device, pool, num_pages * device.page_bytes) as scratch:
        whole_in = Copy(scratch.address, scratch.host_address, scratch.num_bytes)
        whole_out = Copy(scratch.host_address, scratch.address, scratch.num_bytes)
        return LinkBandwidth(
            _best_of(device, Direction.IN, whole_in), _best_of(device, Direction.OUT, whole_out)
        )


def measure_far_share(device: Device, pool: PagePool, near: LinkBandwidth) -> float:
    """Return the share of the link's rate that copies in from another NUMA node have.

    1 on a machine with one node. The device copies such memory through buffers from now on, if that
    is faster. The share depends on the machine: 0.31 with a P100 (gearshifft#82), 1 with an EPYC
    9554 (rocm_bandwidth_test#129).
    """
    own = device.rank_nodes[0]
    far = next((node for node in sorted(node_bytes()) if node != own), None)
    if own == NO_NODE or far is None:
        return 1.0
    num_pages, rates = max(1, min(pool.num_free, _PROBE_BYTES // device.page_bytes)), []
    num_bytes = num_pages * device.page_bytes
    for is_pinned in (True, False):
        with scratch_memory(device, pool, num_bytes, node=far, is_pinned=is_pinned) as scratch:
            whole = Copy(scratch.address, scratch.host_address, scratch.num_bytes)
            rates.append(_best_of(device, Direction.IN, whole))
    direct, staged = rates
    if staged > direct:
        device.stage_far_memory()
    return min(1.0, max(rates) / near.in_bytes_per_s)


def measure_fill(device: Device, pool: PagePool) -> float:
    """Return the bytes per second of mapping and filling pages, as in a switch; best of three.

    Raises:
        OSError: the machine has too little memory.
        CudaError: a call of the driver failed.
    """
    fill_bytes = _FILL_PIECES * device.piece_bytes
    num_pages = min(pool.num_free, max(1, fill_bytes // device.page_bytes))
    with scratch_memory(device, pool, num_pages * device.page_bytes, is_mapped=False) as scratch:
        return scratch.num_bytes / min(_fill_s(device, scratch) for _ in range(_NUM_TRIES))


def _fill_s(device: Device, scratch: Scratch) -> float:
    pages = range(scratch.address_range.num_pages)
    started_s = time.perf_counter()
    scratch.address_range.retain(pages, scratch.buffer.address)
    device.synchronize()
    took_s = time.perf_counter() - started_s
    scratch.address_range.drop(pages)
    return took_s


def _best_of(device: Device, direction: Direction, whole: Copy) -> float:
    """Return the bytes per second of the fastest try, in batches as the transfers make them."""
    batches = list(cut([whole], device.copy_batch_bytes))
    copy_stream = device.open_copy_stream(direction)
    try:
        return whole.num_bytes / min(_try_s(copy_stream, batches) for _ in range(_NUM_TRIES))
    finally:
        copy_stream.close()


def _try_s(copy_stream: CopyStream, batches: list[list[Copy]]) -> float:
    """Return the seconds of all batches, each started before the previous one has finished."""
    after = copy_stream.fence()
    started_s = time.perf_counter()
    for batch in batches:
        last = copy_stream.begin(batch, after)
    copy_stream.wait(last)
    return time.perf_counter() - started_s


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
    device: Device,
    pool: PagePool,
    num_bytes: int,
    *,
    is_mapped: bool = True,
    is_pinned: bool = True,
    node: int | None = None,
) -> Iterator[Scratch]:
    """Allocate ``num_bytes`` of device memory and of pinned host memory until the context ends.

    All pages are touched before. If ``is_mapped`` is false, the address range has no pages. The
    host memory is on a NUMA ``node``, None for the device's.

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
        nodes = device.rank_nodes[:1] if node is None else [node]
        buffer = HostBuffer.create("gpupool-scratch", num_pages * device.page_bytes, nodes)
        undo.callback(buffer.close)
        if is_pinned:
            device.pin(buffer.address, buffer.num_bytes)
            undo.callback(device.unpin, buffer.address, buffer.num_bytes)
        device.synchronize()
        yield Scratch(address_range, buffer, num_bytes)
