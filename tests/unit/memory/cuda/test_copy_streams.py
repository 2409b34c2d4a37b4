"""Lanes of ``CudaDevice``: copies on streams of their own, on the fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from gpupoold.memory.contracts import Copy, Direction, PageRun
from gpupoold.memory.cuda import copy_stream as cuda_lane, pinning as cuda_pinning
from gpupoold.memory.cuda.copy_stream import StreamLane
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.cuda_rig import (
    COMPUTE,
    NUM_PAGES,
    PAGE,
    host_pages,
    in_thread,
    mapped,
    page_of,
)
from tests.unit.memory.fake_cuda import FakeCuda

OpenLane = Callable[[Direction], StreamLane]


@pytest.fixture
def open_lane(device: CudaDevice) -> Iterator[OpenLane]:
    lanes: list[StreamLane] = []

    def make(direction: Direction) -> StreamLane:
        lanes.append(device.open_lane(direction))
        return lanes[-1]

    yield make
    for lane in lanes:
        lane.close()


@pytest.fixture
def region(device: CudaDevice, open_lane: OpenLane) -> Iterator[int]:
    """Sixteen pages; lanes have ended before they go."""
    with mapped(device, 16) as address:
        yield address


def pages_in(region: int, image: HostBuffer, numbers: range) -> list[Copy]:
    """A copy for each page, none beside the other on the device."""
    count = len(numbers)
    return [
        Copy(region + (count - 1 - at) * PAGE, image.address + number * PAGE, PAGE)
        for at, number in enumerate(numbers)
    ]


class TestBatches:
    def test_bytes_arrive_when_they_are_waited_for(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        batch = lane.begin(pages_in(region, image, range(4)), lane.fence())
        assert driver.read(region, 4 * PAGE) == b"\xee" * 4 * PAGE, "begin must not wait"
        lane.wait(batch)
        assert driver.read(region, 4 * PAGE) == b"".join(map(page_of, (3, 2, 1, 0)))

    def test_and_leave(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        driver.kernel_write(region, b"".join(map(page_of, range(20, 24))))
        lane = open_lane(Direction.OUT)
        copies = [Copy(image.address + page * PAGE, region + page * PAGE, PAGE) for page in (3, 1)]
        lane.wait(lane.begin(copies, lane.fence()))
        assert host_pages(image.address, range(4)) == b"".join(map(page_of, (0, 21, 2, 23)))

    def test_several_copies_are_one_call(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        copies = pages_in(region, image, range(4))
        lane.wait(lane.begin(copies, lane.fence()))
        assert driver.batches == [copies]
        assert driver.calls["copy_in"] == 0

    def test_one_copy_is_no_batch(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        lane.wait(lane.begin([Copy(region, image.address, PAGE)], lane.fence()))
        assert (driver.calls["copy_batch"], driver.calls["copy_in"]) == (0, 1)
        lane = open_lane(Direction.OUT)
        lane.wait(lane.begin([Copy(image.address, region, PAGE)], lane.fence()))
        assert (driver.calls["copy_batch"], driver.calls["copy_out"]) == (0, 1)

    def test_waiting_for_a_batch_is_waiting_for_those_before(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        batches = [
            lane.begin([Copy(region + at * PAGE, image.address + at * PAGE, PAGE)], lane.fence())
            for at in range(3)
        ]
        assert batches == sorted(set(batches))
        lane.wait(batches[1])
        assert driver.read(region, 2 * PAGE) == page_of(0) + page_of(1)
        assert driver.read(region + 2 * PAGE, 1) == b"\xee", "only those"
        lane.wait(batches[0])
        lane.wait(batches[2])
        assert driver.calls["synchronize_event"] == 2, "batch 0 was known to be made"

    def test_a_batch_without_bytes_can_be_waited_for(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        first = lane.begin([Copy(region, image.address, PAGE)], lane.fence())
        empty = lane.begin([Copy(region, image.address, 0)], lane.fence())
        assert empty > first
        lane.wait(empty)
        assert driver.read(region, PAGE) == page_of(0)

    def test_a_batch_that_was_not_begun_is_an_error(self, open_lane: OpenLane) -> None:
        lane = open_lane(Direction.IN)
        with pytest.raises(AssertionError, match="batch 1 has not been begun"):
            lane.wait(1)
        with pytest.raises(AssertionError, match="there is no fence 1"):
            lane.begin([], 1)

    def test_events_are_used_again(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        for number in range(50):
            page = number % 16
            copy = Copy(region + page * PAGE, image.address + page * PAGE, PAGE)
            batch = lane.begin([copy], lane.fence())
            if number % 2:
                lane.wait(batch)
        own = 1  # the device's
        assert driver.num_events == own + 3, "a fence and two batches are under way at most"

    def test_what_nobody_waited_for_is_made_before_the_lane_is_closed(
        self, driver: FakeCuda, device: CudaDevice, region: int, image: HostBuffer
    ) -> None:
        lane = device.open_lane(Direction.IN)
        lane.begin([Copy(region, image.address, PAGE)], lane.fence())
        lane.fence()
        in_thread(lane.close)
        assert driver.read(region, PAGE) == page_of(0)


class TestBadDescriptors:
    """Pitfall 21: one bad descriptor fails a whole batch. The fake refuses each kind."""

    def test_pitfall_21_no_empty_copy_gets_into_a_batch(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        copies = pages_in(region, image, range(3))
        copies.insert(1, Copy(region + 8 * PAGE, image.address, 0))
        lane.wait(lane.begin(copies, lane.fence()))
        assert [len(batch) for batch in driver.batches] == [3]

    def test_pitfalls_17_and_21_no_copy_touches_two_registrations(
        self,
        driver: FakeCuda,
        device: CudaDevice,
        open_lane: OpenLane,
        region: int,
        image: HostBuffer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cuda_pinning, "_PIECE_BYTES", 3 * PAGE)
        device.pin(image.address, 16 * PAGE)
        lane = open_lane(Direction.IN)
        lane.wait(lane.begin([Copy(region, image.address + PAGE, 15 * PAGE)], lane.fence()))
        assert [size for _, _, size in driver.batches[0]] == [PAGE * n for n in (2, 3, 3, 3, 3, 1)]
        assert driver.read(region, 15 * PAGE) == host_pages(image.address, range(1, 16))
        lane = open_lane(Direction.OUT)
        lane.wait(lane.begin([Copy(image.address + 5, region, 4 * PAGE)], lane.fence()))
        expected = b"".join(map(page_of, (1, 2, 3, 4)))
        assert ctypes.string_at(image.address + 5, 4 * PAGE) == expected
        device.unpin(image.address, 16 * PAGE)

    def test_pitfall_21_a_huge_batch_is_several_calls(
        self,
        driver: FakeCuda,
        open_lane: OpenLane,
        region: int,
        image: HostBuffer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cuda_lane, "_MAX_COPIES_PER_CALL", 5)
        lane = open_lane(Direction.IN)
        lane.wait(lane.begin(pages_in(region, image, range(11)), lane.fence()))
        assert [len(batch) for batch in driver.batches] == [5, 5, 1]
        expected = b"".join(map(page_of, reversed(range(11))))
        assert driver.read(region, 11 * PAGE) == expected


def test_an_old_driver_gets_copies_one_by_one(image: HostBuffer) -> None:
    driver = FakeCuda(NUM_PAGES * PAGE, can_batch=False)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    lane = device.open_lane(Direction.IN)
    with mapped(device, 4) as region:
        lane.wait(lane.begin(pages_in(region, image, range(4)), lane.fence()))
        assert driver.calls["copy_in"] == 4
        assert driver.read(region, 4 * PAGE) == b"".join(map(page_of, (3, 2, 1, 0)))
    lane.close()
    device.close()
    assert driver.leaks == {}


class TestFences:
    def test_kernels_before_the_fence_have_written_what_is_copied_out(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.OUT)
        driver.kernel_write(region, page_of(77))
        after = lane.fence()
        driver.kernel_write(region, page_of(88))  # its bytes must not be copied: see the Lane
        lane.wait(lane.begin([Copy(image.address, region, PAGE)], after))
        assert host_pages(image.address, [0]) == page_of(77)

    def test_without_the_fence_they_have_not(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        """Guards the fake: it must be able to see a missing fence."""
        lane = open_lane(Direction.OUT)
        before = lane.fence()
        driver.kernel_write(region, page_of(77))
        lane.wait(lane.begin([Copy(image.address, region, PAGE)], before))
        assert host_pages(image.address, [0]) != page_of(77)

    def test_nobody_waits_for_kernels(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        """The turn loop goes on, and its streams are never synchronised by a lane."""
        lane = open_lane(Direction.OUT)
        driver.launch(COMPUTE)
        batch = lane.begin([Copy(image.address, region, PAGE)], lane.fence())
        assert COMPUTE in driver.busy_streams
        driver.launch(COMPUTE)
        lane.wait(batch)
        assert COMPUTE in driver.busy_streams, "the second kernel has not been waited for"
        assert driver.calls["synchronize_stream"] == 0

    def test_all_streams_engines_use_are_fenced(self, image: HostBuffer) -> None:
        driver = FakeCuda(NUM_PAGES * PAGE)
        streams = [0]
        device = CudaDevice(
            0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: streams
        )
        other = driver.create_stream()
        lane = device.open_lane(Direction.OUT)
        with mapped(device, 2) as region:
            driver.kernel_write(region, page_of(50), 0)
            lane.fence()  # nothing comes after this one alone
            driver.kernel_write(region + PAGE, page_of(51), other)
            streams[:] = [other]
            lane.wait(lane.begin([Copy(image.address, region, 2 * PAGE)], lane.fence()))
            assert host_pages(image.address, range(2)) == page_of(50) + page_of(51)
            driver.synchronize_stream(0)
        lane.close()
        device.close()

    def test_a_later_fence_is_left_for_later(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.OUT)
        first = lane.fence()
        driver.kernel_write(region, page_of(60))
        second = lane.fence()
        lane.wait(lane.begin([Copy(image.address, region, PAGE)], first))
        assert host_pages(image.address, [0]) != page_of(60)
        lane.wait(lane.begin([Copy(image.address, region, PAGE)], second))
        assert host_pages(image.address, [0]) == page_of(60)

    def test_copies_into_zeroed_pages_come_after_the_zeros(
        self,
        driver: FakeCuda,
        device: CudaDevice,
        open_lane: OpenLane,
        region: int,
        image: HostBuffer,
    ) -> None:
        lane = open_lane(Direction.IN)
        device.zero(region, 2 * PAGE)
        lane.wait(lane.begin([Copy(region, image.address, PAGE)], lane.fence()))
        device.synchronize()
        assert driver.read(region, 2 * PAGE) == page_of(0) + bytes(PAGE)


class TestThreads:
    def test_the_context_is_bound_once(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        """The fake refuses calls of threads without; pitfall 6: none of them is on page tables."""
        lane = open_lane(Direction.IN)
        fences = [lane.fence() for _ in range(3)]

        def copy() -> None:
            for fence in fences:
                lane.wait(lane.begin(pages_in(region, image, range(3)), fence))

        in_thread(copy)
        assert driver.calls["bind_thread"] == 1
        assert driver.read(region, 3 * PAGE) == b"".join(map(page_of, (2, 1, 0)))

    def test_copies_go_on_while_a_graph_is_captured(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        after = lane.fence()
        driver.capturing_thread = driver.threads.copy().pop()
        in_thread(lambda: lane.wait(lane.begin([Copy(region, image.address, PAGE)], after)))
        driver.capturing_thread = None
        assert driver.read(region, PAGE) == page_of(0)


class TestUnmapping:
    @pytest.mark.parametrize("direction", Direction)
    def test_pitfall_04_no_unmap_while_a_copy_runs(
        self, device: CudaDevice, image: HostBuffer, direction: Direction
    ) -> None:
        """Whoever began a copy waits for it; the device does not, and the fake sees it."""
        lane = device.open_lane(direction)
        with mapped(device, 1) as region:
            ends = (region, image.address)
            copy = Copy(*(ends if direction is Direction.IN else ends[::-1]), PAGE)
            batch = lane.begin([copy], lane.fence())
            with pytest.raises(AssertionError, match="unmap: a kernel or copy is running there"):
                device.unmap(region, [PageRun(0, 1)])
            lane.wait(batch)
        lane.close()

    def test_pitfall_04_other_pages_may_go_meanwhile(
        self, device: CudaDevice, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        batch = lane.begin([Copy(region, image.address, PAGE)], lane.fence())
        with mapped(device, 2):
            pass
        lane.wait(batch)

    def test_a_failed_copy_is_raised_where_it_was_begun(
        self, driver: FakeCuda, open_lane: OpenLane, region: int, image: HostBuffer
    ) -> None:
        lane = open_lane(Direction.IN)
        driver.fail_at["copy_batch"] = 1
        with pytest.raises(CudaError, match="copy_batch failed"):
            lane.begin(pages_in(region, image, range(2)), lane.fence())
        lane.wait(lane.begin(pages_in(region, image, range(2)), lane.fence()))
        assert driver.read(region, 2 * PAGE) == page_of(1) + page_of(0)
