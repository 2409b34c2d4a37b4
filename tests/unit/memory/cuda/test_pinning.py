"""Host memory registered with the fake driver, which refuses what CUDA refuses."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
from hypothesis import given, strategies as st

from gpupoold.memory.contracts import Copy, Direction
from gpupoold.memory.cuda import device as cuda, pinning as cuda_pinning
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.cuda.pinning import PinnedMemory
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.cuda_rig import PAGE, host_pages, mapped, page_of
from tests.unit.memory.fake_cuda import FakeCuda


def test_pitfalls_17_and_18_no_call_registers_more_than_1_gib(
    device: CudaDevice, driver: FakeCuda
) -> None:
    """512 GiB at once fail, and each call keeps other threads' launches waiting."""
    device.pin(1 << 45, (5 << 29) + PAGE)  # the fake touches nothing
    assert list(driver.registrations.values()) == [1 << 30, 1 << 30, (1 << 29) + PAGE]
    device.unpin(1 << 45, (5 << 29) + PAGE)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pinning, "_PIECE_BYTES", 6 * PAGE)


@pytest.mark.usefixtures("pieces")
class TestPinning:
    def test_in_pieces(self, device: CudaDevice, driver: FakeCuda, image: HostBuffer) -> None:
        device.pin(image.address, 16 * PAGE)
        start = image.address
        assert driver.registrations == {
            start: 6 * PAGE,
            start + 6 * PAGE: 6 * PAGE,
            start + 12 * PAGE: 4 * PAGE,
        }
        device.unpin(image.address, 16 * PAGE)
        assert driver.registrations == {}

    def test_pitfall_17_no_copy_touches_two_registrations(
        self, device: CudaDevice, driver: FakeCuda, image: HostBuffer
    ) -> None:
        device.pin(image.address, 14 * PAGE)  # what is not pinned is another piece
        before = host_pages(image.address, range(16))
        with mapped(device, 16) as region:
            device.copy_in(region, image.address, 16 * PAGE)  # the fake would object
            device.synchronize()
            assert driver.kernel_read(region, 16 * PAGE) == before
            device.copy_out(image.address + 5 * PAGE + 1, region, 8 * PAGE)
            device.synchronize()
            assert ctypes.string_at(image.address + 5 * PAGE + 1, 8 * PAGE) == before[: 8 * PAGE]
        device.unpin(image.address, 14 * PAGE)

    def test_pitfall_17_all_or_nothing(
        self, device: CudaDevice, driver: FakeCuda, image: HostBuffer
    ) -> None:
        driver.fail_at["register_host"] = 2
        with pytest.raises(CudaError):
            device.pin(image.address, 16 * PAGE)
        assert driver.registrations == {}
        device.pin(image.address, 16 * PAGE)

    def test_unpinning_what_is_not_pinned_is_an_error(
        self, device: CudaDevice, image: HostBuffer
    ) -> None:
        device.pin(image.address, 6 * PAGE)
        with pytest.raises(ValueError, match="not pinned"):
            device.unpin(image.address, 16 * PAGE)

    def test_the_devices_own_copies_end_before_unpinning(
        self, device: CudaDevice, driver: FakeCuda, image: HostBuffer
    ) -> None:
        device.pin(image.address, 16 * PAGE)
        with mapped(device, 1) as region:
            device.copy_in(region, image.address, PAGE)
            device.unpin(image.address, 16 * PAGE)
            assert driver.read(region, PAGE) == page_of(0)

    def test_a_lanes_copies_must_have_been_waited_for(
        self, device: CudaDevice, image: HostBuffer
    ) -> None:
        """Guards the fake: it must be able to see a missing wait."""
        device.pin(image.address, 16 * PAGE)
        lane = device.open_lane(Direction.IN)
        with mapped(device, 1) as region:
            batch = lane.begin([Copy(region, image.address, PAGE)], lane.fence())
            with pytest.raises(AssertionError, match="a copy is running there"):
                device.unpin(image.address, 16 * PAGE)
            lane.wait(batch)
            device.unpin(image.address, 16 * PAGE)
        lane.close()

    def test_close_unpins(self, driver: FakeCuda, image: HostBuffer) -> None:
        device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
        device.pin(image.address, 16 * PAGE)
        device.close()
        assert driver.leaks == {}


def test_pages_that_pinning_makes_come_from_the_devices_node(
    device: CudaDevice, image: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prefer(node: int) -> nullcontext[None]:
        asked.append(node)
        return nullcontext()

    monkeypatch.setattr(cuda, "prefer_node", prefer)
    device.numa_node = 1
    device.pin(image.address, PAGE)
    assert asked == [1]


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
    for offset, length in parts:
        assert offset == at
        assert length > 0
        inside = range(address + offset + 1, address + offset + length)
        assert not edges & set(inside)
        at += length
    assert at == num_bytes
    assert len(parts) <= 1 + len(edges)
    if num_bytes and not edges & set(range(address + 1, address + num_bytes)):
        assert len(parts) == 1


def _ranges(driver: FakeCuda) -> list[tuple[int, int]]:
    return [(start, start + length) for start, length in driver.registrations.items()]
