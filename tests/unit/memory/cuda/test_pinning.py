"""Host memory registered with the fake driver, which refuses what CUDA refuses."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext

import pytest
from hypothesis import given, strategies as st

from gpupoold.memory.cuda import device as cuda
from gpupoold.memory.cuda.device import CudaDevice, PinnedMemory
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.device import Copy, Direction
from gpupoold.memory.host import HostBuffer
from tests.unit.memory.cuda_rig import PAGE, host_pages, mapped, page_of
from tests.unit.memory.fake_cuda import FakeCuda


def test_pitfalls_17_and_18_no_call_registers_more_than_64_mib(
    device: CudaDevice, driver: FakeCuda
) -> None:
    """512 GiB at once fail, and each call keeps other threads' launches waiting."""
    device.pin(1 << 45, (5 << 25) + PAGE)  # the fake touches nothing
    assert list(driver.registrations.values()) == [64 << 20, 64 << 20, (32 << 20) + PAGE]
    device.unpin(1 << 45, (5 << 25) + PAGE)


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "_PIN_BYTES", 6 * PAGE)


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

    def test_pitfall_17_all_or_nothing(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        driver.fail_at["register_host"] = 2
        with pytest.raises(CudaError):
            device.pin(snapshot.address, 16 * PAGE)
        assert driver.registrations == {}
        device.pin(snapshot.address, 16 * PAGE)

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


def test_pages_that_pinning_makes_come_from_the_devices_node(
    device: CudaDevice, snapshot: HostBuffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def prefer(node: int) -> nullcontext[None]:
        asked.append(node)
        return nullcontext()

    monkeypatch.setattr(cuda, "prefer_node", prefer)
    device.numa_node = 1
    device.pin(snapshot.address, PAGE)
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
