"""Copy streams of ``CudaDevice``: copies on streams of their own, on the fake driver."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator

import pytest

from gpupoold.memory import pinning
from gpupoold.memory.cuda import driver as cuda_copy_stream
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.device import Copy, CopyStream, Direction
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PageRun
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

OpenCopyStream = Callable[[Direction], CopyStream]


@pytest.fixture
def open_copy_stream(device: CudaDevice, snapshot: HostBuffer) -> Iterator[OpenCopyStream]:
    device.pin(snapshot.address, snapshot.num_bytes)
    copy_streams: list[CopyStream] = []

    def make(direction: Direction) -> CopyStream:
        copy_streams.append(device.open_copy_stream(direction))
        return copy_streams[-1]

    yield make
    for copy_stream in copy_streams:
        copy_stream.close()


@pytest.fixture
def address_range(device: CudaDevice, open_copy_stream: OpenCopyStream) -> Iterator[int]:
    """Sixteen pages; copy streams have ended before they go."""
    with mapped(device, 16) as address:
        yield address


def pages_in(address_range: int, snapshot: HostBuffer, numbers: range) -> list[Copy]:
    """A copy for each page, none beside the other on the device."""
    count = len(numbers)
    return [
        Copy(address_range + (count - 1 - at) * PAGE, snapshot.address + number * PAGE, PAGE)
        for at, number in enumerate(numbers)
    ]


class TestBatches:
    def test_bytes_arrive_when_they_are_waited_for(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        batch = copy_stream.begin(pages_in(address_range, snapshot, range(4)), copy_stream.fence())
        assert driver.read(address_range, 4 * PAGE) == b"\xee" * 4 * PAGE, "begin must not wait"
        copy_stream.wait(batch)
        assert driver.read(address_range, 4 * PAGE) == b"".join(map(page_of, (3, 2, 1, 0)))

    def test_and_leave(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        driver.kernel_write(address_range, b"".join(map(page_of, range(20, 24))))
        copy_stream = open_copy_stream(Direction.OUT)
        copies = [
            Copy(snapshot.address + page * PAGE, address_range + page * PAGE, PAGE)
            for page in (3, 1)
        ]
        copy_stream.wait(copy_stream.begin(copies, copy_stream.fence()))
        assert host_pages(snapshot.address, range(4)) == b"".join(map(page_of, (0, 21, 2, 23)))

    def test_several_copies_are_one_call(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        copies = pages_in(address_range, snapshot, range(4))
        copy_stream.wait(copy_stream.begin(copies, copy_stream.fence()))
        assert driver.batches == [copies]
        assert driver.calls["copy_in"] == 0

    def test_long_copies_are_cut(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Small copies of the engines wait for one piece only."""
        monkeypatch.setattr(cuda_copy_stream, "_MAX_COPY_BYTES", PAGE // 2 + 100)
        copy_stream = open_copy_stream(Direction.IN)
        copy = Copy(address_range, snapshot.address, PAGE)
        copy_stream.wait(copy_stream.begin([copy], copy_stream.fence()))
        [pieces] = driver.batches
        assert [piece[2] for piece in pieces] == [PAGE // 2 + 100, PAGE // 2 - 100]
        assert driver.read(address_range, PAGE) == page_of(0)

    def test_one_copy_is_no_batch(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        copy_stream.wait(
            copy_stream.begin([Copy(address_range, snapshot.address, PAGE)], copy_stream.fence())
        )
        assert (driver.calls["copy_batch"], driver.calls["copy_in"]) == (0, 1)
        copy_stream = open_copy_stream(Direction.OUT)
        copy_stream.wait(
            copy_stream.begin([Copy(snapshot.address, address_range, PAGE)], copy_stream.fence())
        )
        assert (driver.calls["copy_batch"], driver.calls["copy_out"]) == (0, 1)

    def test_waiting_for_a_batch_is_waiting_for_those_before(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        batches = [
            copy_stream.begin(
                [Copy(address_range + at * PAGE, snapshot.address + at * PAGE, PAGE)],
                copy_stream.fence(),
            )
            for at in range(3)
        ]
        assert batches == sorted(set(batches))
        copy_stream.wait(batches[1])
        assert driver.read(address_range, 2 * PAGE) == page_of(0) + page_of(1)
        assert driver.read(address_range + 2 * PAGE, 1) == b"\xee", "only those"
        copy_stream.wait(batches[0])
        copy_stream.wait(batches[2])
        assert driver.calls["synchronize_event"] == 2, "batch 0 was known to be made"

    def test_a_batch_without_bytes_can_be_waited_for(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        first = copy_stream.begin(
            [Copy(address_range, snapshot.address, PAGE)], copy_stream.fence()
        )
        empty = copy_stream.begin([Copy(address_range, snapshot.address, 0)], copy_stream.fence())
        assert empty > first
        copy_stream.wait(empty)
        assert driver.read(address_range, PAGE) == page_of(0)

    def test_a_batch_that_was_not_begun_is_an_error(self, open_copy_stream: OpenCopyStream) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        with pytest.raises(AssertionError, match="batch 1 has not been begun"):
            copy_stream.wait(1)
        with pytest.raises(AssertionError, match="there is no fence 1"):
            copy_stream.begin([], 1)

    def test_events_are_used_again(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        for number in range(50):
            page = number % 16
            copy = Copy(address_range + page * PAGE, snapshot.address + page * PAGE, PAGE)
            batch = copy_stream.begin([copy], copy_stream.fence())
            if number % 2:
                copy_stream.wait(batch)
        own = 1  # the device's
        assert driver.num_events == own + 3, "a fence and two batches are under way at most"

    def test_what_nobody_waited_for_is_made_before_the_copy_stream_is_closed(
        self, driver: FakeCuda, device: CudaDevice, address_range: int, snapshot: HostBuffer
    ) -> None:
        copy_stream = device.open_copy_stream(Direction.IN)
        copy_stream.begin([Copy(address_range, snapshot.address, PAGE)], copy_stream.fence())
        copy_stream.fence()
        in_thread(copy_stream.close)
        assert driver.read(address_range, PAGE) == page_of(0)


class TestBadDescriptors:
    """Pitfall 21: one bad descriptor fails a whole batch. The fake refuses each kind."""

    def test_pitfall_21_no_empty_copy_gets_into_a_batch(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        copies = pages_in(address_range, snapshot, range(3))
        copies.insert(1, Copy(address_range + 8 * PAGE, snapshot.address, 0))
        copy_stream.wait(copy_stream.begin(copies, copy_stream.fence()))
        assert [len(batch) for batch in driver.batches] == [3]

    def test_pitfalls_17_and_21_no_copy_touches_two_registrations(
        self,
        driver: FakeCuda,
        device: CudaDevice,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(pinning, "PIN_BYTES", 3 * PAGE)
        device.unpin(snapshot.address, 16 * PAGE)
        device.pin(snapshot.address, 16 * PAGE)
        copy_stream = open_copy_stream(Direction.IN)
        copy_stream.wait(
            copy_stream.begin(
                [Copy(address_range, snapshot.address + PAGE, 15 * PAGE)], copy_stream.fence()
            )
        )
        assert [size for _, _, size in driver.batches[0]] == [PAGE * n for n in (2, 3, 3, 3, 3, 1)]
        assert driver.read(address_range, 15 * PAGE) == host_pages(snapshot.address, range(1, 16))
        copy_stream = open_copy_stream(Direction.OUT)
        copy_stream.wait(
            copy_stream.begin(
                [Copy(snapshot.address + 5, address_range, 4 * PAGE)], copy_stream.fence()
            )
        )
        expected = b"".join(map(page_of, (1, 2, 3, 4)))
        assert ctypes.string_at(snapshot.address + 5, 4 * PAGE) == expected
        device.unpin(snapshot.address, 16 * PAGE)

    def test_pitfall_21_a_huge_batch_is_several_calls(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(cuda_copy_stream, "_MAX_COPIES_PER_CALL", 5)
        copy_stream = open_copy_stream(Direction.IN)
        copy_stream.wait(
            copy_stream.begin(pages_in(address_range, snapshot, range(11)), copy_stream.fence())
        )
        assert [len(batch) for batch in driver.batches] == [5, 5, 1]
        expected = b"".join(map(page_of, reversed(range(11))))
        assert driver.read(address_range, 11 * PAGE) == expected


def test_an_old_driver_gets_copies_one_by_one(snapshot: HostBuffer) -> None:
    driver = FakeCuda(NUM_PAGES * PAGE, can_batch=False)
    device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
    copy_stream = device.open_copy_stream(Direction.IN)
    with mapped(device, 4) as address_range:
        copy_stream.wait(
            copy_stream.begin(pages_in(address_range, snapshot, range(4)), copy_stream.fence())
        )
        assert driver.calls["copy_in"] == 4
        assert driver.read(address_range, 4 * PAGE) == b"".join(map(page_of, (3, 2, 1, 0)))
    copy_stream.close()
    device.close()
    assert driver.leaks == {}


class TestFences:
    def test_kernels_before_the_fence_have_written_what_is_copied_out(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.OUT)
        driver.kernel_write(address_range, page_of(77))
        after = copy_stream.fence()
        driver.kernel_write(
            address_range, page_of(88)
        )  # its bytes must not be copied: see the CopyStream
        copy_stream.wait(copy_stream.begin([Copy(snapshot.address, address_range, PAGE)], after))
        assert host_pages(snapshot.address, [0]) == page_of(77)

    def test_without_the_fence_they_have_not(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        """Guards the fake: it must be able to see a missing fence."""
        copy_stream = open_copy_stream(Direction.OUT)
        before = copy_stream.fence()
        driver.kernel_write(address_range, page_of(77))
        copy_stream.wait(copy_stream.begin([Copy(snapshot.address, address_range, PAGE)], before))
        assert host_pages(snapshot.address, [0]) != page_of(77)

    def test_nobody_waits_for_kernels(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        """The turn loop goes on, and its streams are never synchronised by a copy stream."""
        copy_stream = open_copy_stream(Direction.OUT)
        driver.launch(COMPUTE)
        batch = copy_stream.begin(
            [Copy(snapshot.address, address_range, PAGE)], copy_stream.fence()
        )
        assert COMPUTE in driver.busy_streams
        driver.launch(COMPUTE)
        copy_stream.wait(batch)
        assert COMPUTE in driver.busy_streams, "the second kernel has not been waited for"
        assert driver.calls["synchronize_stream"] == 0

    def test_all_streams_engines_use_are_fenced(self, snapshot: HostBuffer) -> None:
        driver = FakeCuda(NUM_PAGES * PAGE)
        streams = [0]
        device = CudaDevice(
            0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: streams
        )
        other = driver.create_stream()
        copy_stream = device.open_copy_stream(Direction.OUT)
        with mapped(device, 2) as address_range:
            driver.kernel_write(address_range, page_of(50), 0)
            copy_stream.fence()  # nothing comes after this one alone
            driver.kernel_write(address_range + PAGE, page_of(51), other)
            streams[:] = [other]
            copy_stream.wait(
                copy_stream.begin(
                    [Copy(snapshot.address, address_range, 2 * PAGE)], copy_stream.fence()
                )
            )
            assert host_pages(snapshot.address, range(2)) == page_of(50) + page_of(51)
            driver.synchronize_stream(0)
        copy_stream.close()
        device.close()

    def test_a_later_fence_is_left_for_later(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.OUT)
        first = copy_stream.fence()
        driver.kernel_write(address_range, page_of(60))
        second = copy_stream.fence()
        copy_stream.wait(copy_stream.begin([Copy(snapshot.address, address_range, PAGE)], first))
        assert host_pages(snapshot.address, [0]) != page_of(60)
        copy_stream.wait(copy_stream.begin([Copy(snapshot.address, address_range, PAGE)], second))
        assert host_pages(snapshot.address, [0]) == page_of(60)

    def test_copies_into_zeroed_pages_come_after_the_zeros(
        self,
        driver: FakeCuda,
        device: CudaDevice,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        device.zero(address_range, 2 * PAGE)
        copy_stream.wait(
            copy_stream.begin([Copy(address_range, snapshot.address, PAGE)], copy_stream.fence())
        )
        device.synchronize()
        assert driver.read(address_range, 2 * PAGE) == page_of(0) + bytes(PAGE)


class TestThreads:
    def test_the_context_is_bound_once(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        """The fake refuses calls of threads without; pitfall 6: none of them is on page tables."""
        copy_stream = open_copy_stream(Direction.IN)
        fences = [copy_stream.fence() for _ in range(3)]

        def copy() -> None:
            for fence in fences:
                copy_stream.wait(
                    copy_stream.begin(pages_in(address_range, snapshot, range(3)), fence)
                )

        in_thread(copy)
        assert driver.calls["bind_thread"] == 1
        assert driver.read(address_range, 3 * PAGE) == b"".join(map(page_of, (2, 1, 0)))

    def test_copies_go_on_while_a_graph_is_captured(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        after = copy_stream.fence()
        driver.capturing_thread = driver.threads.copy().pop()
        in_thread(
            lambda: copy_stream.wait(
                copy_stream.begin([Copy(address_range, snapshot.address, PAGE)], after)
            )
        )
        driver.capturing_thread = None
        assert driver.read(address_range, PAGE) == page_of(0)


class TestUnmapping:
    @pytest.mark.parametrize("direction", Direction)
    def test_pitfall_04_no_unmap_while_a_copy_runs(
        self, device: CudaDevice, snapshot: HostBuffer, direction: Direction
    ) -> None:
        """Whoever began a copy waits for it; the device does not, and the fake sees it."""
        copy_stream = device.open_copy_stream(direction)
        with mapped(device, 1) as address_range:
            ends = (address_range, snapshot.address)
            copy = Copy(*(ends if direction is Direction.IN else ends[::-1]), PAGE)
            batch = copy_stream.begin([copy], copy_stream.fence())
            with pytest.raises(AssertionError, match="unmap: a kernel or copy is running there"):
                device.unmap(address_range, [PageRun(0, 1)])
            copy_stream.wait(batch)
        copy_stream.close()

    def test_pitfall_04_other_pages_may_go_meanwhile(
        self,
        device: CudaDevice,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        batch = copy_stream.begin(
            [Copy(address_range, snapshot.address, PAGE)], copy_stream.fence()
        )
        with mapped(device, 2):
            pass
        copy_stream.wait(batch)

    def test_a_failed_copy_is_raised_where_it_was_begun(
        self,
        driver: FakeCuda,
        open_copy_stream: OpenCopyStream,
        address_range: int,
        snapshot: HostBuffer,
    ) -> None:
        copy_stream = open_copy_stream(Direction.IN)
        driver.fail_at["copy_batch"] = 1
        with pytest.raises(CudaError, match="copy_batch failed"):
            copy_stream.begin(pages_in(address_range, snapshot, range(2)), copy_stream.fence())
        copy_stream.wait(
            copy_stream.begin(pages_in(address_range, snapshot, range(2)), copy_stream.fence())
        )
        assert driver.read(address_range, 2 * PAGE) == page_of(1) + page_of(0)
