"""Sizes and bytes that the tests of ``CudaDevice`` share; their fixtures are in ``conftest``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.pages import PageRun

PAGE = 4096
NUM_PAGES = 64
COMPUTE = 0


def page_of(number: int) -> bytes:
    return bytes([number + 1]) * PAGE


def host_pages(address: int, numbers: Sequence[int]) -> bytes:
    """Host memory at ``address``, the pages with these numbers."""
    return b"".join(ctypes.string_at(address + number * PAGE, PAGE) for number in numbers)


@contextmanager
def mapped(device: CudaDevice, num_pages: int) -> Iterator[int]:
    """Addresses with the first pages behind them."""
    runs = [PageRun(0, num_pages)]
    address = device.reserve(num_pages)
    device.map(address, runs)
    yield address
    device.unmap(address, runs)
    device.release(address, num_pages)


def in_thread(work: Callable[[], None]) -> None:
    """Run ``work`` in another thread, as a copy stream's is; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
