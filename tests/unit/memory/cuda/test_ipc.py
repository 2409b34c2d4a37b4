"""A copy stream that comes after one of another process: two fake drivers are two processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpupoold.memory.contracts import Copy, Direction, PageRun
from gpupoold.memory.cuda.copy_stream import CudaCopyStream
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.cuda_rig import NUM_PAGES, PAGE, host_pages, page_of
from tests.unit.memory.fake_cuda import Event, FakeCuda


@dataclass(frozen=True, slots=True)
class Process:
    """A device whose first page is mapped at ``address_range``, with a copy stream."""

    driver: FakeCuda
    device: CudaDevice
    address_range: int
    copy_stream: CudaCopyStream

    def close(self) -> None:
        self.copy_stream.close()
        self.device.unmap(self.address_range, [PageRun(0, 1)])
        self.device.release(self.address_range, 1)
        self.device.close()
        assert self.driver.leaks == {}


def start(direction: Direction, exported: dict[bytes, tuple[FakeCuda, Event]]) -> Process:
    driver = FakeCuda(NUM_PAGES * PAGE, exported=exported)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    address_range = device.reserve(1)
    device.map(address_range, [PageRun(0, 1)])
    return Process(driver, device, address_range, device.open_copy_stream(direction))


@pytest.fixture
def processes(snapshot: HostBuffer) -> Iterator[tuple[Process, Process]]:
    """One that gives KV away over host memory that both have, ``snapshot``, and one that takes
    it."""
    exported: dict[bytes, tuple[FakeCuda, Event]] = {}
    giver, taker = start(Direction.OUT, exported), start(Direction.IN, exported)
    yield giver, taker
    taker.close()
    giver.close()


def give(giver: Process, snapshot: HostBuffer, page: int, content: bytes) -> int:
    giver.driver.kernel_write(giver.address_range, content)
    copy = Copy(snapshot.address + page * PAGE, giver.address_range, PAGE)
    return giver.copy_stream.begin([copy], giver.copy_stream.fence())


def take(taker: Process, snapshot: HostBuffer, page: int) -> bytes:
    copy = Copy(taker.address_range, snapshot.address + page * PAGE, PAGE)
    taker.copy_stream.wait(taker.copy_stream.begin([copy], taker.copy_stream.fence()))
    return taker.driver.read(taker.address_range, PAGE)


def test_what_is_taken_has_been_given(
    processes: tuple[Process, Process], snapshot: HostBuffer
) -> None:
    giver, taker = processes
    handle = giver.copy_stream.export(give(giver, snapshot, 3, page_of(70)))
    assert host_pages(snapshot.address, [3]) == page_of(3), "nobody has waited yet"
    taker.copy_stream.wait_for(handle)
    assert take(taker, snapshot, 3) == page_of(70)
    giver.copy_stream.end_export(handle)


def test_without_the_handle_it_has_not(
    processes: tuple[Process, Process], snapshot: HostBuffer
) -> None:
    """Guards the fake: it must be able to see a missing wait."""
    giver, taker = processes
    give(giver, snapshot, 3, page_of(70))
    assert take(taker, snapshot, 3) == page_of(3)


def test_an_event_stands_for_its_batch_until_it_is_taken_back(
    processes: tuple[Process, Process], snapshot: HostBuffer
) -> None:
    giver, taker = processes
    first = giver.copy_stream.export(give(giver, snapshot, 3, page_of(70)))
    second = giver.copy_stream.export(give(giver, snapshot, 4, page_of(71)))
    assert first != second, "the first is still in use"
    taker.copy_stream.wait_for(second)
    assert take(taker, snapshot, 4) == page_of(71)
    giver.copy_stream.end_export(second)
    assert giver.copy_stream.export(give(giver, snapshot, 5, page_of(72))) == second
    taker.copy_stream.wait_for(second)
    assert take(taker, snapshot, 5) == page_of(72)
    assert taker.driver.calls["open_ipc_event"] == 1, "it was open already"


def test_ordinary_batches_do_not_use_exported_events(
    processes: tuple[Process, Process], snapshot: HostBuffer
) -> None:
    giver, taker = processes
    handle = giver.copy_stream.export(give(giver, snapshot, 3, page_of(70)))
    for page in (4, 5, 6):
        giver.copy_stream.wait(give(giver, snapshot, page, page_of(80)))
    give(giver, snapshot, 7, page_of(81))
    taker.copy_stream.wait_for(handle)
    assert take(taker, snapshot, 3) == page_of(70)
    assert host_pages(snapshot.address, [7]) == page_of(7), "a later batch was not waited for"


def test_misuse_is_seen(processes: tuple[Process, Process], snapshot: HostBuffer) -> None:
    giver, taker = processes
    with pytest.raises(AssertionError, match="batch 1 has not been begun"):
        giver.copy_stream.export(1)
    handle = giver.copy_stream.export(give(giver, snapshot, 3, page_of(70)))
    with pytest.raises(AssertionError, match="has not exported the handle"):
        taker.copy_stream.end_export(handle)
    giver.copy_stream.end_export(handle)
    with pytest.raises(AssertionError, match="has ended already"):
        giver.copy_stream.end_export(handle)
    with pytest.raises(AssertionError, match="opened where it was made"):
        giver.copy_stream.wait_for(handle)


def test_a_closed_copy_stream_takes_its_events_along(snapshot: HostBuffer) -> None:
    exported: dict[bytes, tuple[FakeCuda, Event]] = {}
    giver, taker = start(Direction.OUT, exported), start(Direction.IN, exported)
    handle = giver.copy_stream.export(give(giver, snapshot, 3, page_of(70)))
    giver.close()
    with pytest.raises(AssertionError, match="its maker has destroyed it"):
        taker.copy_stream.wait_for(handle)
    taker.close()
