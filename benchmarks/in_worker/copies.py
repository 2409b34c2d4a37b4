"""Plain copies between host and device, the reference for every transfer."""

from __future__ import annotations

import time
from collections.abc import Callable

from gpupoold.memory import libc
from gpupoold.memory.bandwidth import Scratch
from gpupoold.memory.device import Device


def plain_copies(
    device: Device, scratch: Scratch
) -> dict[str, tuple[Callable[[], float], Callable[[], float]]]:
    """Return ways to copy all of ``scratch`` in and out, by name; each call returns its seconds.

    ``device_copy`` is the device's own copy: by two threads on an emulated device, by the copy
    engine from pinned memory on a GPU. ``memcpy_one_thread`` is present if the host can address the
    memory.
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
