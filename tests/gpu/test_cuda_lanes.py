"""Copy streams on a real GPU: what the fake driver can only assume."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpupoold.memory import pinning
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.device import Copy, Direction
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PageRun
from tests.gpu.conftest import NUM_PAGES, PAGE

pytestmark = pytest.mark.gpu

HALF = NUM_PAGES // 2


@pytest.fixture
def address_range(device: CudaDevice) -> Iterator[int]:
    runs = [PageRun(0, HALF)]
    address = device.reserve(HALF)
    device.map(address, runs)
    yield address
    device.unmap(address, runs)
    device.release(address, HALF)


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def scattered(address: int, snapshot: HostBuffer, part_bytes: int) -> list[Copy]:
    """The whole snapshot in parts, the last of which comes first on the device."""
    last = snapshot.num_bytes - part_bytes
    parts = range(0, snapshot.num_bytes, part_bytes)
    return [Copy(address + last - at, snapshot.address + at, part_bytes) for at in parts]


@pytest.mark.parametrize("part_bytes", [PAGE, 64 << 10, 16 << 10])
def test_batches_come_in_and_go_out_in_threads_of_their_own(
    device: CudaDevice,
    snapshot: HostBuffer,
    address_range: int,
    thread: ThreadPoolExecutor,
    part_bytes: int,
) -> None:
    """6144 parts of 16 KiB are more than one call takes."""
    expected = ctypes.string_at(snapshot.address, snapshot.num_bytes)
    ins, outs = device.open_copy_stream(Direction.IN), device.open_copy_stream(Direction.OUT)
    copies = scattered(address_range, snapshot, part_bytes)

    def move() -> None:
        ins.wait(ins.begin(copies, in_fence))
        ctypes.memset(snapshot.address, 0, snapshot.num_bytes)
        back = [Copy(source, target, num_bytes) for target, source, num_bytes in copies]
        outs.wait(outs.begin(back, out_fence))

    in_fence, out_fence = ins.fence(), outs.fence()
    thread.submit(move).result()
    assert ctypes.string_at(snapshot.address, snapshot.num_bytes) == expected
    ins.close()
    outs.close()


def test_copies_cross_registrations(
    device: CudaDevice, address_range: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "PIN_BYTES", 1 << 20)
    buffer = HostBuffer.create("gpu-pieces", 8 << 20)
    data = os.urandom(buffer.num_bytes)
    ctypes.memmove(buffer.address, data, buffer.num_bytes)
    device.pin(buffer.address, buffer.num_bytes)
    copy_stream = device.open_copy_stream(Direction.IN)
    skip = 12_345
    copy = Copy(address_range, buffer.address + skip, buffer.num_bytes - skip)
    copy_stream.wait(copy_stream.begin([copy], copy_stream.fence()))
    ctypes.memset(buffer.address, 0, buffer.num_bytes)
    device.copy_out(buffer.address, address_range, buffer.num_bytes - skip)
    device.synchronize()
    assert ctypes.string_at(buffer.address, buffer.num_bytes - skip) == data[skip:]
    copy_stream.close()
    device.unpin(buffer.address, buffer.num_bytes)
    buffer.close()


def test_pitfall_21_a_batch_across_registrations_is_refused(
    device: CudaDevice, address_range: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Why ``CudaCopyStream`` splits copies."""
    monkeypatch.setattr(pinning, "PIN_BYTES", 1 << 20)
    buffer = HostBuffer.create("gpu-pieces", 2 << 20)
    device.pin(buffer.address, buffer.num_bytes)
    stream = device._driver.create_stream()
    good, bad = (
        (address_range, buffer.address, 4096),
        (address_range + PAGE, buffer.address, 2 << 20),
    )
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_VALUE"):
        device._driver.copy_batch([good, bad], stream)
    device._driver.synchronize_stream(stream)
    device._driver.destroy_stream(stream)
    device.unpin(buffer.address, buffer.num_bytes)
    buffer.close()
