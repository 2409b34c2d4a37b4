"""One small device per test, and pinned host memory."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator

import pytest

from gpupoold.memory.cuda import CudaDevice
from gpupoold.memory.host import HostBuffer

PAGE = 2 << 20
NUM_PAGES = 96


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice(0, NUM_PAGES * PAGE, 0)
    assert opened.num_pages == NUM_PAGES
    yield opened
    opened.close()


@pytest.fixture
def image(device: CudaDevice) -> Iterator[HostBuffer]:
    """Pinned shared memory with random bytes, for half of the pages."""
    buffer = HostBuffer.create("gpu-test", NUM_PAGES // 2 * PAGE)
    ctypes.memmove(buffer.address, random.Random(1).randbytes(buffer.num_bytes), buffer.num_bytes)
    device.pin(buffer.address, buffer.num_bytes)
    yield buffer
    device.unpin(buffer.address, buffer.num_bytes)
    buffer.close()
