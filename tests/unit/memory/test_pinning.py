"""Host memory registered with the fake driver, which refuses what CUDA refuses."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from gpupoold.memory import libc, pinning
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.device import Copy, Direction
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pinning import IdleLock, PinnedMemory
from tests.unit.memory.cuda_rig import PAGE, host_pages, mapped, page_of
from tests.unit.memory.fake_cuda import FakeCuda
from tests.unit.memory.rig import until


def test_pitfalls_17_and_18_no_call_registers_more_than_64_mib(
    device: CudaDevice, driver: FakeCuda
) -> None:
    """512 GiB at once fail, and each call keeps other threads' launches waiting."""
    device.pin(1 << 45, (5 << 25) + PAGE)  # the fake touches nothing
    assert list(driver.registrations.values()) == [64 << 20, 64 << 20, (32 << 20) + PAGE]
    device.unpin(1 << 45, (5 << 25) + PAGE)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pinning, "PIN_BYTES", 6 * PAGE)


@pytest.mark.usefixtures("pieces")
class TestPinning:
    def test_in_pieces(self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer) -> None:
        device.pin(snapshot.address, 16 * PAGE)
        start = snapshot.address
        assert driver.registrations == {
            start: 6 * PAGE,
            start + 6 * PAGE: 6 * PAGE,
            start + 12 * PAGE: 4 * PAGE,
        }
        device.unpin(snapshot.address, 16 * PAGE)
        assert driver.registrations == {}

    def test_pitfall_17_no_copy_touches_two_registrations(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        device.pin(snapshot.address, 14 * PAGE)  # what is not pinned is another piece
        before = host_pages(snapshot.address, range(16))
        with mapped(device, 16) as address_range:
            device.copy_in(address_range, snapshot.address, 16 * PAGE)  # the fake would object
            device.synchronize()
            assert driver.kernel_read(address_range, 16 * PAGE) == before
            device.copy_out(snapshot.address + 5 * PAGE + 1, address_range, 8 * PAGE)
            device.synchronize()
            assert ctypes.string_at(snapshot.address + 5 * PAGE + 1, 8 * PAGE) == before[: 8 * PAGE]
        device.unpin(snapshot.address, 14 * PAGE)

    def test_what_the_driver_refuses_is_tried_again_when_other_memory_is_unpinned(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        device.pin(snapshot.address + 12 * PAGE, 4 * PAGE)
        driver.fail_at["register_host"] = 3
        device.pin(snapshot.address, 12 * PAGE)
        pinned = device.pinned
        assert "register_host" in pinned.unpinned.problem
        assert pinned.unpinned.num_bytes == 6 * PAGE
        device.unpin(snapshot.address + 12 * PAGE, 4 * PAGE)
        until(lambda: not pinned.unpinned.num_bytes)
        assert pinned.unpinned.problem == ""

    def test_unpinning_what_is_not_pinned_is_an_error(
        self, device: CudaDevice, snapshot: HostBuffer
    ) -> None:
        device.pin(snapshot.address, 6 * PAGE)
        with pytest.raises(ValueError, match="not pinned"):
            device.unpin(snapshot.address, 16 * PAGE)

    def test_the_devices_own_copies_end_before_unpinning(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        device.pin(snapshot.address, 16 * PAGE)
        with mapped(device, 1) as address_range:
            device.copy_in(address_range, snapshot.address, PAGE)
            device.unpin(snapshot.address, 16 * PAGE)
            assert driver.read(address_range, PAGE) == page_of(0)

    def test_a_copy_streams_copies_must_have_been_waited_for(
        self, device: CudaDevice, snapshot: HostBuffer
    ) -> None:
        """Guards the fake: it must be able to see a missing wait."""
        device.pin(snapshot.address, 16 * PAGE)
        copy_stream = device.open_copy_stream(Direction.IN)
        with mapped(device, 1) as address_range:
            batch = copy_stream.begin(
                [Copy(address_range, snapshot.address, PAGE)], copy_stream.fence()
            )
            with pytest.raises(AssertionError, match="a copy is running there"):
                device.unpin(snapshot.address, 16 * PAGE)
            copy_stream.wait(batch)
            device.unpin(snapshot.address, 16 * PAGE)
        copy_stream.close()

    def test_close_unpins(self, driver: FakeCuda, snapshot: HostBuffer) -> None:
        device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
        device.pin(snapshot.address, 16 * PAGE)
        device.close()
        assert driver.leaks == {}


def test_buffers_are_near_the_device(device: CudaDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(libc, "prefer_node", lambda address, size, node: asked.append(node))
    device.pinned.numa_node = 1
    for copy_stream in device.open_copy_streams(Direction.IN):
        copy_stream.close()
    assert asked == [1]


def test_far_memory_is_not_pinned_if_buffers_are_faster(
    device: CudaDevice, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far, unknown = (number << 40 for number in range(1, 4))
    nodes = {near: 0, far: 1, unknown: libc.NO_NODE}
    monkeypatch.setattr(libc, "most_used_node", lambda address, num_bytes: nodes[address])
    device.pinned.numa_node = 0
    device.stage_far_memory()
    for address in nodes:
        device.pin_later(address, PAGE)
    until(lambda: not device.unpinned().num_bytes)
    assert driver.registrations.keys() == {near, unknown}
    for address in nodes:
        device.unpin(address, PAGE)


@given(
    pinned=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=4),
    address=st.integers(0, 60),
    num_bytes=st.integers(0, 60),
)
def test_parts_make_up_the_range_and_cross_no_edge(
    pinned: list[tuple[int, int]], address: int, num_bytes: int
) -> None:
    driver = FakeCuda(0)
    driver.open(0)
    memory = PinnedMemory(driver)
    edges: set[int] = set()
    for start, length in pinned:
        if not any(start < end and begin < start + length for begin, end in _ranges(driver)):
            memory.pin(start, length)
            edges |= {start, start + length}
    parts = list(memory.split(address, num_bytes))
    at = 0
    for offset, length, is_pinned in parts:
        assert offset == at
        assert length > 0
        assert is_pinned == any(start <= address + offset < end for start, end in _ranges(driver))
        inside = range(address + offset + 1, address + offset + length)
        assert not edges & set(inside)
        at += length
    assert at == num_bytes
    assert len(parts) <= 1 + len(edges)
    if num_bytes and not edges & set(range(address + 1, address + num_bytes)):
        assert len(parts) == 1


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("num_pinned", [0, 5, 16])
def test_copies_of_memory_that_is_not_pinned_have_the_right_bytes(
    device: CudaDevice,
    driver: FakeCuda,
    snapshot: HostBuffer,
    monkeypatch: pytest.MonkeyPatch,
    direction: Direction,
    num_pinned: int,
) -> None:
    """Through buffers of three pages, of which the driver has two in use."""
    monkeypatch.setattr(device, "copy_batch_bytes", 3 * PAGE)
    if num_pinned:
        device.pin(snapshot.address, num_pinned * PAGE)
    before = host_pages(snapshot.address, range(16))
    with mapped(device, 16) as address_range:
        copies = [
            Copy(address_range + page * PAGE, snapshot.address + page * PAGE, 2 * PAGE)
            for page in range(0, 16, 2)
        ]
        copy_stream = device.open_copy_stream(Direction.IN)
        batches = [copy_stream.begin([copy], copy_stream.fence()) for copy in copies]
        copy_stream.wait(batches[-1])
        assert driver.kernel_read(address_range, 16 * PAGE) == before
        if direction is Direction.OUT:
            ctypes.memset(snapshot.address, 0, 16 * PAGE)
            out = device.open_copy_stream(Direction.OUT)
            back = [Copy(copy.source, copy.target, copy.num_bytes) for copy in copies]
            first = out.begin(back[:4], out.fence())
            last = out.begin(back[4:], out.fence())
            out.wait(first)
            assert host_pages(snapshot.address, range(8)) == before[: 8 * PAGE]
            out.wait(last)
            assert host_pages(snapshot.address, range(16)) == before
            out.close()
        copy_stream.close()


def test_the_devices_own_copies_of_such_memory_have_the_right_bytes(
    device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
) -> None:
    before = host_pages(snapshot.address, range(16))
    with mapped(device, 16) as address_range:
        device.copy_in(address_range, snapshot.address, 16 * PAGE)
        device.synchronize()
        assert driver.kernel_read(address_range, 16 * PAGE) == before
        ctypes.memset(snapshot.address, 0, 16 * PAGE)
        device.copy_out(snapshot.address, address_range, 16 * PAGE)
        device.synchronize()
    assert host_pages(snapshot.address, range(16)) == before


@pytest.mark.usefixtures("pieces")
class TestIdleMoments:
    @pytest.fixture
    def live(self, tmp_path: Path) -> Iterator[IdleLock]:
        """Another worker of the machine, with live requests."""
        lock = IdleLock(tmp_path / "live")
        lock.set_live(True)
        yield lock
        lock.close()

    @pytest.fixture
    def memory(self, driver: FakeCuda, live: IdleLock, tmp_path: Path) -> Iterator[PinnedMemory]:
        driver.open(0)
        made = PinnedMemory(driver, IdleLock(tmp_path / "live"))
        yield made
        made.close()
        assert driver.registrations == {}

    def test_memory_is_pinned_when_no_worker_has_live_requests(
        self,
        memory: PinnedMemory,
        live: IdleLock,
        driver: FakeCuda,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(pinning, "_LIVE_INTERVAL_S", 600.0)
        memory.pin_later(1 << 45, 16 * PAGE)
        time.sleep(0.05)
        assert driver.registrations == {}
        memory.close()
        assert memory.unpinned.num_bytes == 0
        memory = PinnedMemory(driver, IdleLock())
        live.set_live(False)
        memory.pin_later(1 << 45, 16 * PAGE)
        until(lambda: not memory.unpinned.num_bytes)
        assert len(driver.registrations) == 3
        memory.close()

    def test_beside_live_requests_a_piece_at_a_time_of_the_range_used_last(
        self, memory: PinnedMemory, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pinning, "_LIVE_INTERVAL_S", 0.05)
        first, second, third = (number << 40 for number in (1, 2, 3))
        for address in (first, second, third):
            memory.pin_later(address, 12 * PAGE)
        assert [part.is_pinned for part in memory.split(second, 12 * PAGE)] == [False]
        until(lambda: not memory.unpinned.num_bytes)
        order = [address >> 40 for call, address, _ in driver.log if call == "register_host"]
        assert order in ([2, 2, 1, 1, 3, 3], [1, 2, 2, 1, 3, 3])  # the thread may be faster

    def test_memory_that_is_unpinned_meanwhile_is_not_pinned_any_more(
        self, memory: PinnedMemory, live: IdleLock, driver: FakeCuda
    ) -> None:
        memory.pin_later(1 << 40, 600 * PAGE)
        memory.pin_later(2 << 40, 600 * PAGE)
        live.set_live(False)
        until(lambda: bool(driver.registrations))
        memory.unpin(1 << 40, 600 * PAGE)
        memory.unpin(2 << 40, 600 * PAGE)
        assert driver.registrations == {}
        with pytest.raises(ValueError, match="not pinned"):
            memory.unpin(2 << 40, 600 * PAGE)


class Clock:
    """A clock in which each call of the driver takes 10 ms, and the pauses that were made."""

    def __init__(self) -> None:
        self.pauses_s: list[float] = []
        self._now_s = 0.0

    def __call__(self) -> float:
        self._now_s += 0.01
        return self._now_s

    def sleep(self, seconds: float) -> None:
        self.pauses_s.append(seconds)


@pytest.mark.usefixtures("pieces")
class TestUnpinning:
    @pytest.mark.parametrize(("is_live", "pause_s"), [(False, 0.001), (True, 0.04)])
    def test_a_piece_at_a_time_with_pauses_for_others(
        self, driver: FakeCuda, is_live: bool, pause_s: float
    ) -> None:
        driver.open(0)
        clock = Clock()
        memory = PinnedMemory(driver, clock=clock, sleep=clock.sleep)
        memory.pin(1 << 45, 16 * PAGE)
        memory.idle.set_live(is_live)
        driver.log.clear()
        clock.pauses_s.clear()
        memory.unpin(1 << 45, 16 * PAGE)
        starts = [(1 << 45) + page * PAGE for page in (12, 6, 0)]
        assert [at for call, at, _ in driver.log if call == "unregister_host"] == starts
        assert clock.pauses_s == pytest.approx([pause_s] * 3)

    def test_a_thread_unpins_before_others_may_unmap(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        device.pin(1 << 45, 16 * PAGE)
        left = list[dict[int, int]]()
        device.unpin_later(1 << 45, 16 * PAGE, lambda: left.append(driver.registrations))
        assert device.unpinned().num_bytes == 0
        until(lambda: bool(left))
        assert left == [{}]
        with pytest.raises(ValueError, match="not pinned"):
            device.unpin(1 << 45, 16 * PAGE)

    def test_it_goes_before_pinning(
        self, device: CudaDevice, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pinning, "_LIVE_INTERVAL_S", 600.0)
        device.pin(1 << 45, 6 * PAGE)
        device.set_live(True)
        device.pin_later(1 << 46, 6 * PAGE)
        unpinned = threading.Event()
        device.unpin_later(1 << 45, 6 * PAGE, unpinned.set)
        assert unpinned.wait(20)
        assert driver.registrations == {}
        device.unpin(1 << 46, 6 * PAGE)

    def test_memory_that_cannot_be_unpinned_stays_mapped(
        self, device: CudaDevice, driver: FakeCuda, caplog: pytest.LogCaptureFixture
    ) -> None:
        device.pin(1 << 45, 6 * PAGE)
        driver.fail_at["unregister_host"] = 1
        device.unpin_later(1 << 45, 6 * PAGE, lambda: pytest.fail("unmapped"))
        until(lambda: "stays mapped" in caplog.text)

    def test_a_range_that_is_being_pinned(self, device: CudaDevice, driver: FakeCuda) -> None:
        for _ in range(20):
            device.pin_later(1 << 45, 60 * PAGE)
            unpinned = threading.Event()
            device.unpin_later(1 << 45, 60 * PAGE, unpinned.set)
            assert unpinned.wait(20)
            assert driver.registrations == {}


def _ranges(driver: FakeCuda) -> list[tuple[int, int]]:
    return [(start, start + length) for start, length in driver.registrations.items()]
