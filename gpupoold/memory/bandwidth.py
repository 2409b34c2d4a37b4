"""How fast a device's link to host memory is, measured with the lanes that will use it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass

from gpupoold.memory.contracts import Copy, Device, Direction, Lane
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.pages import PagePool
from gpupoold.memory.regions import Region

# 3 ms of a fast link: what it costs to begin and to be woken hardly counts beside it.
_PROBE_BYTES = 128 << 20
_FILL_BYTES = 32 << 20
_BATCH_BYTES = 8 << 20
_NUM_TRIES = 3


@dataclass(frozen=True, slots=True)
class LinkBandwidth:
    """Bytes per second of copies in one direction at a time."""

    in_bytes_per_s: float
    """Host to device."""
    out_bytes_per_s: float
    """Device to host."""


def measure_link(device: Device, pool: PagePool, num_bytes: int = _PROBE_BYTES) -> LinkBandwidth:
    """Copy ``num_bytes``, or as much as there are free pages for, each way; the best of three.

    Pages and pinned host memory are taken before: what is measured is the link. Called
    under :func:`~gpupoold.memory.numa.prefer_node`, it is the link to that node.

    Raises:
        OutOfPages: no page is free.
        OSError: the machine has too little memory.
        CudaError: the driver refused something.
    """
    num_pages = max(1, min(pool.num_free, num_bytes // device.page_bytes))
    with ExitStack() as undo:
        region = Region(device, pool, num_pages)
        undo.callback(region.close)
        region.retain(range(num_pages))
        buffer = HostBuffer.create("gpupool-probe", num_pages * device.page_bytes)
        undo.callback(buffer.close)
        device.pin(buffer.address, buffer.num_bytes)
        undo.callback(device.unpin, buffer.address, buffer.num_bytes)
        device.synchronize()
        whole_in = Copy(region.address, buffer.address, buffer.num_bytes)
        whole_out = Copy(buffer.address, region.address, buffer.num_bytes)
        return LinkBandwidth(
            _best_of(device.open_lane(Direction.IN), whole_in),
            _best_of(device.open_lane(Direction.OUT), whole_out),
        )


def measure_fill(device: Device, pool: PagePool) -> float:
    """Bytes per second of a switch: mapping pages and filling them; the best of three.

    Raises:
        OSError: the machine has too little memory.
        CudaError: the driver refused something.
    """
    num_pages = min(pool.num_free, max(1, _FILL_BYTES // device.page_bytes))
    with ExitStack() as undo:
        region = Region(device, pool, num_pages)
        undo.callback(region.close)
        source = HostBuffer.create("gpupool-probe", num_pages * device.page_bytes)
        undo.callback(source.close)
        device.pin(source.address, source.num_bytes)
        undo.callback(device.unpin, source.address, source.num_bytes)
        return source.num_bytes / min(_fill_s(device, region, source) for _ in range(_NUM_TRIES))


def _fill_s(device: Device, region: Region, source: HostBuffer) -> float:
    pages = range(region.num_pages)
    started_s = time.perf_counter()
    region.retain(pages, source.address)
    device.synchronize()
    took_s = time.perf_counter() - started_s
    region.drop(pages)
    return took_s


def _best_of(lane: Lane, whole: Copy) -> float:
    """Bytes per second of the quickest try; closes the lane."""
    batches = _cut(whole)
    try:
        return whole.num_bytes / min(_try_s(lane, batches) for _ in range(_NUM_TRIES))
    finally:
        lane.close()


def _try_s(lane: Lane, batches: list[Copy]) -> float:
    """Seconds of all batches, each begun before the one before it has been made."""
    after = lane.fence()
    started_s = time.perf_counter()
    for batch in batches:
        last = lane.begin([batch], after)
    lane.wait(last)
    return time.perf_counter() - started_s


def _cut(whole: Copy) -> list[Copy]:
    target, source, num_bytes = whole
    return [
        Copy(target + at, source + at, min(_BATCH_BYTES, num_bytes - at))
        for at in range(0, num_bytes, _BATCH_BYTES)
    ]
