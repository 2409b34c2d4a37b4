"""One small device per test, and pinned host memory; checkpoints and logs for the scenarios."""

from __future__ import annotations

import ctypes
import importlib.util
import random
from collections.abc import Generator, Iterator

import pytest

from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.host_buffer import HostBuffer
from tests.gpu.rig import LOGS, Checkpoints

PAGE = 2 << 20
NUM_PAGES = 96

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows what the processes said that it ran with."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
        report.sections += LOGS.tails()
    return report


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoints]:
    """The models of all scenarios."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("the engine is not installed")
    made = Checkpoints(tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.close()


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice(0, NUM_PAGES * PAGE, 0, PAGE)
    assert opened.num_pages == NUM_PAGES
    yield opened
    opened.close()


@pytest.fixture
def snapshot(device: CudaDevice) -> Iterator[HostBuffer]:
    """Pinned shared memory with random bytes, for half of the pages."""
    buffer = HostBuffer.create("gpu-test", NUM_PAGES // 2 * PAGE)
    ctypes.memmove(buffer.address, random.Random(1).randbytes(buffer.num_bytes), buffer.num_bytes)
    device.pin(buffer.address, buffer.num_bytes)
    yield buffer
    device.unpin(buffer.address, buffer.num_bytes)
    buffer.close()
