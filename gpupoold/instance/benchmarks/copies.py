"""Plain copies between host and device: what every transfer is measured against."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from gpupoold.memory import libc
from gpupoold.memory.contracts import Device
from gpupoold.memory.host import HostBuffer
from gpupoold.memory.pages import PagePool
from gpupoold.memory.regions import Region


class Scratch:
    """Mapped pages, and as much pinned host memory, all touched before: a context manager.

    Raises:
        OutOfPages: the device has fewer free.
        OSError: the host has too little memory.
    """

    def __init__(self, device: Device, pool: PagePool, num_bytes: int) -> None:
        num_pages = -(-num_bytes // device.page_bytes)
        self.num_bytes = num_bytes
        with ExitStack() as undo:
            region = Region(device, pool, num_pages)
            undo.callback(region.close)
            region.retain(range(num_pages))
            buffer = HostBuffer.create("gpupool-scratch", num_pages * device.page_bytes)
            undo.callback(buffer.close)
            device.pin(buffer.address, buffer.num_bytes)
            undo.callback(device.unpin, buffer.address, buffer.num_bytes)
            device.synchronize()
            self._undo = undo.pop_all()
        self.address = region.address
        self.host_address = buffer.address

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()


def plain_copies(
    device: Device, scratch: Scratch
) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Ways to copy all of ``scratch`` in and out, by name; each call returns its seconds.

    ``device_copy`` is the device's own: on an emulated device by two threads, on a GPU by its
    copy engine, from pinned memory. ``memcpy_one_thread`` is there where the host can do it.
    """
    at, host, num_bytes = scratch.address, scratch.host_address, scratch.num_bytes

    def copy_in() -> None:
        device.copy_in(at, host, num_bytes)
        device.synchronize()

    def copy_out() -> None:
        device.copy_out(host, at, num_bytes)
        device.synchronize()

    ways = {"device_copy": (_timed(copy_in), _timed(copy_out))}
    if device.is_host_addressable:
        ways["memcpy_one_thread"] = (
            _timed(lambda: libc.memcpy(at, host, num_bytes)),
            _timed(lambda: libc.memcpy(host, at, num_bytes)),
        )
    return ways


def _timed(act: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        started_s = time.perf_counter()
        act()
        return time.perf_counter() - started_s

    return run
