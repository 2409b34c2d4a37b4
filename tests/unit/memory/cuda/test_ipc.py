"""A lane that comes after one of another process: two fake drivers are two processes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpupoold.memory.contracts import Copy, Direction, PageRun
from gpupoold.memory.cuda.copy_stream import StreamLane
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.cuda_rig import NUM_PAGES, PAGE, host_pages, page_of
from tests.unit.memory.fake_cuda import Event, FakeCuda


@dataclass(frozen=True, slots=True)
class Process:
    """A device whose first page is mapped at ``region``, with a lane."""

    driver: FakeCuda
    device: CudaDevice
    region: int
    lane: StreamLane

    def close(self) -> None:
        self.lane.close()
        self.device.unmap(self.region, [PageRun(0, 1)])
        self.device.release(self.region, 1)
        self.device.close()
        assert self.driver.leaks == {}


def start(direction: Direction, exported: dict[bytes, tuple[FakeCuda, Event]]) -> Process:
    driver = FakeCuda(NUM_PAGES * PAGE, exported=exported)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    region = device.reserve(1)
    device.map(region, [PageRun(0, 1)])
    return Process(driver, device, region, device.open_lane(direction))


@pytest.fixture
def processes(image: HostBuffer) -> Iterator[tuple[Process, Process]]:
    """One that gives KV away over host memory that both have, ``image``, and one that takes it."""
    exported: dict[bytes, tuple[FakeCuda, Event]] = {}
    giver, taker = start(Direction.OUT, exported), start(Direction.IN, exported)
    yield giver, taker
    taker.close()
    giver.close()


def give(giver: Process, image: HostBuffer, page: int, content: bytes) -> int:
    giver.driver.kernel_write(giver.region, content)
    copy = Copy(image.address + page * PAGE, giver.region, PAGE)
    return giver.lane.begin([copy], giver.lane.fence())


def take(taker: Process, image: HostBuffer, page: int) -> bytes:
    copy = Copy(taker.region, image.address + page * PAGE, PAGE)
    taker.lane.wait(taker.lane.begin([copy], taker.lane.fence()))
    return taker.driver.read(taker.region, PAGE)


def test_what_is_taken_has_been_given(
    processes: tuple[Process, Process], image: HostBuffer
) -> None:
    giver, taker = processes
    handle = giver.lane.export(give(giver, image, 3, page_of(70)))
    assert host_pages(image.address, [3]) == page_of(3), "nobody has waited yet"
    taker.lane.wait_for(handle)
    assert take(taker, image, 3) == page_of(70)
    giver.lane.end_export(handle)


def test_without_the_handle_it_has_not(
    processes: tuple[Process, Process], image: HostBuffer
) -> None:
    """Guards the fake: it must be able to see a missing wait."""
    giver, taker = processes
    give(giver, image, 3, page_of(70))
    assert take(taker, image, 3) == page_of(3)


def test_an_event_stands_for_its_batch_until_it_is_taken_back(
    processes: tuple[Process, Process], image: HostBuffer
) -> None:
    giver, taker = processes
    first = giver.lane.export(give(giver, image, 3, page_of(70)))
    second = giver.lane.export(give(giver, image, 4, page_of(71)))
    assert first != second, "the first is still in use"
    taker.lane.wait_for(second)
    assert take(taker, image, 4) == page_of(71)
    giver.lane.end_export(second)
    assert giver.lane.export(give(giver, image, 5, page_of(72))) == second
    taker.lane.wait_for(second)
    assert take(taker, image, 5) == page_of(72)
    assert taker.driver.calls["open_ipc_event"] == 1, "it was open already"


def test_ordinary_batches_do_not_use_exported_events(
    processes: tuple[Process, Process], image: HostBuffer
) -> None:
    giver, taker = processes
    handle = giver.lane.export(give(giver, image, 3, page_of(70)))
    for page in (4, 5, 6):
        giver.lane.wait(give(giver, image, page, page_of(80)))
    give(giver, image, 7, page_of(81))
    taker.lane.wait_for(handle)
    assert take(taker, image, 3) == page_of(70)
    assert host_pages(image.address, [7]) == page_of(7), "a later batch was not waited for"


def test_misuse_is_seen(processes: tuple[Process, Process], image: HostBuffer) -> None:
    giver, taker = processes
    with pytest.raises(AssertionError, match="batch 1 has not been begun"):
        giver.lane.export(1)
    handle = giver.lane.export(give(giver, image, 3, page_of(70)))
    with pytest.raises(AssertionError, match="has not exported it"):
        taker.lane.end_export(handle)
    giver.lane.end_export(handle)
    with pytest.raises(AssertionError, match="given back before"):
        giver.lane.end_export(handle)
    with pytest.raises(AssertionError, match="opened where it was made"):
        giver.lane.wait_for(handle)


def test_a_closed_lane_takes_its_events_along(image: HostBuffer) -> None:
    exported: dict[bytes, tuple[FakeCuda, Event]] = {}
    giver, taker = start(Direction.OUT, exported), start(Direction.IN, exported)
    handle = giver.lane.export(give(giver, image, 3, page_of(70)))
    giver.close()
    with pytest.raises(AssertionError, match="its maker has destroyed it"):
        taker.lane.wait_for(handle)
    taker.close()
