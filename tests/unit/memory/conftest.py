"""Devices per test with what belongs to them; leaks fail the test."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.host_buffer import HostBuffer
from tests.unit.memory.cuda_rig import NUM_PAGES, PAGE, page_of
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.rig import Rig


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture
def driver() -> FakeCuda:
    return FakeCuda(total_bytes=NUM_PAGES * PAGE)


@pytest.fixture
def snapshot() -> Iterator[HostBuffer]:
    """Sixteen pages of host bytes, each page different."""
    buffer = HostBuffer.create("test-snapshots", 16 * PAGE)
    ctypes.memmove(buffer.address, b"".join(page_of(i) for i in range(16)), 16 * PAGE)
    yield buffer
    buffer.close()


@pytest.fixture
def device(driver: FakeCuda, snapshot: HostBuffer) -> Iterator[CudaDevice]:
    """Every test ends with everything given back. The snapshot outlives copies left behind."""
    opened = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    yield opened
    opened.close()
    assert driver.leaks == {}
    assert driver.free_bytes == driver.total_bytes
