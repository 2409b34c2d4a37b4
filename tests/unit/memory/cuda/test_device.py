"""``CudaDevice`` on a fake driver that is strict about page tables and stream order."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest

from gpupoold.errors import Failed
from gpupoold.memory.cuda import device as cuda
from gpupoold.memory.cuda.device import CudaDevice
from gpupoold.memory.cuda.driver import CudaError
from gpupoold.memory.device import most_addressable
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.pages import PageRun
from tests.unit.memory.cuda_rig import COMPUTE, NUM_PAGES, PAGE, in_thread, mapped, page_of
from tests.unit.memory.fake_cuda import FakeCuda


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CudaDevice, "piece_bytes", 4 * PAGE)


class TestOpening:
    def test_takes_all_free_memory_less_the_reserve(self) -> None:
        driver = FakeCuda(100 * PAGE, taken_bytes=10 * PAGE)
        device = CudaDevice(0, 0, reserve_bytes=20 * PAGE + 1, page_bytes=PAGE, driver=driver)
        assert device.num_pages == 69
        assert device.free_bytes() == 21 * PAGE
        device.close()
        assert driver.leaks == {}

    def test_device_bytes_are_a_cap(self) -> None:
        driver = FakeCuda(100 * PAGE)
        few = CudaDevice(0, 5 * PAGE + 7, 0, page_bytes=PAGE, driver=driver)
        assert few.num_pages == 5
        few.close()
        all_but_reserve = CudaDevice(0, 99 * PAGE, 50 * PAGE, page_bytes=PAGE, driver=driver)
        assert all_but_reserve.num_pages == 50
        all_but_reserve.close()

    def test_pages_are_made_once(self, device: CudaDevice, driver: FakeCuda) -> None:
        address_range = device.reserve(8)
        for _ in range(3):
            device.map_and_fill(address_range, [PageRun(0, 8)], None)
            device.unmap(address_range, [PageRun(0, 8)])
        device.release(address_range, 8)
        assert driver.calls["create"] == NUM_PAGES

    def test_a_page_is_8_mib_by_default_or_the_granularity_if_larger(self) -> None:
        for granularity, page_bytes in ((2 << 20, 8 << 20), (16 << 20, 16 << 20)):
            driver = FakeCuda(32 << 20, granularity=granularity)
            device = CudaDevice(0, 0, 0, driver=driver)
            assert device.page_bytes == page_bytes
            device.close()

    def test_a_page_size_cuda_cannot_map_is_refused(self) -> None:
        driver = FakeCuda(8 << 20, granularity=2 << 20)
        with pytest.raises(Failed, match=r"page_bytes is 3 MiB, not a multiple of 2 MiB"):
            CudaDevice(0, 0, 0, page_bytes=3 << 20, driver=driver)
        assert driver.leaks == {}

    def test_a_full_gpu_is_refused_with_the_sizes(self) -> None:
        driver = FakeCuda(8 << 20, taken_bytes=5 << 20)
        with pytest.raises(Failed, match=r"3 MiB of 8 MiB free, .* keeps 2 MiB free"):
            CudaDevice(0, 0, 2 << 20, driver=driver)
        assert driver.leaks == {}

    @pytest.mark.parametrize("call", ["create", "create_stream", "create_event"])
    def test_a_failure_gives_everything_back(self, driver: FakeCuda, call: str) -> None:
        driver.fail_at[call] = 3 if call == "create" else 1
        with pytest.raises(CudaError, match=f"{call} failed"):
            CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
        assert {name for name in driver.leaks if name != "streams"} == set()


class TestMapping:
    def test_one_grant_of_access_and_one_unmap_per_range(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        runs = [PageRun(10, 3), PageRun(0, 2)]
        address_range = device.reserve(5)
        device.map(address_range, runs)
        assert driver.calls["map"] == 5
        assert driver.calls["allow_access"] == 1
        device.unmap(address_range, runs)
        assert driver.calls["unmap"] == 1
        device.release(address_range, 5)

    def test_runs_lie_one_behind_the_other(self, device: CudaDevice, driver: FakeCuda) -> None:
        address_range, other = device.reserve(3), device.reserve(1)
        device.map(address_range, [PageRun(7, 1), PageRun(3, 2)])
        for page in range(3):
            driver.kernel_write(address_range + page * PAGE, page_of(page))
        driver.synchronize_stream(COMPUTE)
        device.unmap(address_range, [PageRun(7, 1), PageRun(3, 2)])
        device.map(other, [PageRun(4, 1)])
        assert driver.read(other, PAGE) == page_of(2)
        device.unmap(other, [PageRun(4, 1)])
        device.release(address_range, 3)
        device.release(other, 1)

    def test_a_page_can_be_mapped_all_over_a_address_range(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        address_range, runs = device.reserve(9), [PageRun(5, 1)] * 9
        device.map(address_range, runs)
        driver.kernel_write(address_range + 8 * PAGE, b"abc")
        driver.synchronize_stream(COMPUTE)
        assert driver.read(address_range, 3) == b"abc"
        device.unmap(address_range, runs)
        device.release(address_range, 9)

    @pytest.mark.parametrize(("call", "at"), [("map", 3), ("allow_access", 1)])
    def test_a_failed_map_leaves_nothing_mapped(
        self, device: CudaDevice, driver: FakeCuda, call: str, at: int
    ) -> None:
        address_range = device.reserve(4)
        driver.fail_at[call] = at
        with pytest.raises(CudaError):
            device.map(address_range, [PageRun(0, 4)])
        device.map(address_range, [PageRun(0, 4)])
        device.unmap(address_range, [PageRun(0, 4)])
        device.release(address_range, 4)

    def test_pitfall_03_kernels_end_before_their_pages_go(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        address_range = device.reserve(1)
        device.map(address_range, [PageRun(0, 1)])
        driver.launch(COMPUTE)
        device.unmap(address_range, [PageRun(0, 1)])  # the fake fails when kernels still run
        device.release(address_range, 1)

    def test_all_streams_engines_use_are_waited_for(self, driver: FakeCuda) -> None:
        streams: list[int] = [0]
        device = CudaDevice(
            0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: streams
        )
        streams.append(driver.create_stream())
        address_range = device.reserve(1)
        device.map(address_range, [PageRun(0, 1)])
        driver.launch(streams[1])
        device.unmap(address_range, [PageRun(0, 1)])
        device.release(address_range, 1)
        device.close()

    def test_several_ranges_are_waited_for_once(self, device: CudaDevice, driver: FakeCuda) -> None:
        address_range = device.reserve(9)
        mappings = [(address_range + at * PAGE, [PageRun(at, 2)]) for at in (0, 3, 7)]
        for mapping in mappings:
            device.map(*mapping)
        before = driver.calls.copy()
        device.unmap_each(mappings)
        done = driver.calls - before
        assert done["unmap"] == 3
        assert done["synchronize_stream"] == 3  # the compute stream, copies in, copies out
        device.release(address_range, 9)

    def test_pages_of_a_paused_model_wait_for_its_last_kernels_only(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        paused, running = device.reserve(1), device.reserve(1)
        device.map(paused, [PageRun(0, 1)])
        device.map(running, [PageRun(1, 1)])
        driver.launch(COMPUTE, paused, paused + PAGE)
        fence = device.open_fence()
        fence.wait()  # without a moment
        fence.record()
        driver.launch(COMPUTE, running, running + PAGE)
        device.unmap_each([(paused, [PageRun(0, 1)])], fence)
        device.map(paused, [PageRun(2, 1)])
        assert driver.busy_streams == [COMPUTE]
        device.unmap_each([(running, [PageRun(1, 1)]), (paused, [PageRun(2, 1)])])
        num_events = driver.num_events
        fence.record()
        fence.record()
        assert driver.num_events == num_events
        fence.close()
        assert driver.num_events == num_events - 1
        for address in (paused, running):
            device.release(address, 1)

    def test_a_paused_models_pages_have_the_next_owner_before_they_are_unmapped(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        former, following = device.reserve(6), device.reserve(6)
        device.map(former, [PageRun(0, 6)])
        fence = device.open_fence()
        fence.record()
        before = driver.calls["unmap"]
        device.unmap_each([(former, [PageRun(0, 6)])], fence)
        assert driver.calls["unmap"] == before
        driver.log.clear()
        device.map(following, [PageRun(0, 2)])
        device.map(following + 2 * PAGE, [PageRun(2, 2)])
        assert [(at, size) for call, at, size in driver.log if call == "unmap"] == [
            (former, 2 * PAGE),
            (former + 2 * PAGE, 2 * PAGE),
        ]
        device.map(former + 5 * PAGE, [PageRun(8, 1)])  # at an address whose mapping is left
        device.unmap_each([(following, [PageRun(0, 4)]), (former + 5 * PAGE, [PageRun(8, 1)])])
        fence.close()
        for address in (former, following):
            device.release(address, 6)

    def test_addresses_and_memory_are_given_back_without_mappings(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        """The driver keeps memory that has a mapping, and refuses to free such addresses."""
        fence = device.open_fence()
        fence.record()
        address = device.reserve(2)
        for _ in range(2):
            device.map(address, [PageRun(0, 2)])
            device.unmap_each([(address, [PageRun(0, 2)])], fence)
            device.release_memory([PageRun(0, 2)])
            assert driver.leaks.get("mappings") is None
            device.reclaim([PageRun(0, 2)])
        device.map(address, [PageRun(0, 2)])
        device.unmap_each([(address, [PageRun(0, 2)])], fence)
        device.release(address, 2)
        assert driver.leaks.get("mappings") is None
        fence.close()

    def test_pitfall_04_copies_end_before_their_pages_go(
        self, device: CudaDevice, snapshot: HostBuffer
    ) -> None:
        address_range = device.reserve(1)
        device.map(address_range, [PageRun(0, 1)])
        device.copy_in(address_range, snapshot.address, PAGE)
        device.copy_out(snapshot.address + PAGE, address_range, PAGE)
        device.unmap(address_range, [PageRun(0, 1)])
        device.release(address_range, 1)


@pytest.mark.usefixtures("small_pieces")
class TestFilling:
    @pytest.fixture
    def device(
        self, driver: FakeCuda, snapshot: HostBuffer, small_pieces: None
    ) -> Iterator[CudaDevice]:
        opened = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
        opened.pin(snapshot.address, snapshot.num_bytes)
        yield opened
        opened.close()
        assert driver.leaks == {}

    def test_bytes_are_there_after_synchronize(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        runs = [PageRun(40, 7), PageRun(2, 9)]
        address_range = device.reserve(16)
        device.map_and_fill(address_range, runs, snapshot.address)
        device.synchronize()
        expected = b"".join(page_of(i) for i in range(16))
        assert driver.kernel_read(address_range, 16 * PAGE) == expected
        device.unmap(address_range, runs)
        device.release(address_range, 16)

    def test_without_synchronize_they_are_not(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        """Guards the fake: it must be able to see a missing wait."""
        address_range = device.reserve(1)
        device.map_and_fill(address_range, [PageRun(0, 1)], snapshot.address)
        assert driver.kernel_read(address_range, PAGE) != page_of(0)
        device.unmap(address_range, [PageRun(0, 1)])
        device.release(address_range, 1)

    def test_kernels_wait_for_zeros_by_themselves(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        address_range = device.reserve(9)
        device.map_and_fill(address_range, [PageRun(0, 9)], None)
        assert driver.kernel_read(address_range, 9 * PAGE) == bytes(9 * PAGE)
        device.unmap(address_range, [PageRun(0, 9)])
        device.release(address_range, 9)

    def test_the_next_piece_is_mapped_after_a_copy_was_started(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        address_range = device.reserve(10)
        driver.log.clear()
        device.map_and_fill(address_range, [PageRun(0, 10)], snapshot.address)
        steps = [call for call, _, _ in driver.log if call != "map"]
        assert steps == ["allow_access", "copy_in"] * 3
        sizes = [num_bytes for call, _, num_bytes in driver.log if call == "copy_in"]
        assert sizes == [4 * PAGE, 4 * PAGE, 2 * PAGE]
        device.unmap(address_range, [PageRun(0, 10)])
        device.release(address_range, 10)

    def test_a_paused_models_pages_are_unmapped_during_the_copies(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        former, following = device.reserve(8), device.reserve(8)
        device.map(former, [PageRun(0, 8)])
        fence = device.open_fence()
        fence.record()
        device.unmap_each([(former, [PageRun(0, 8)])], fence)
        driver.log.clear()
        device.map_and_fill(following, [PageRun(0, 8)], snapshot.address)
        steps = [call for call, _, _ in driver.log if call != "map"]
        assert steps == ["allow_access", "copy_in", "unmap"] * 2
        device.unmap(following, [PageRun(0, 8)])
        fence.close()
        for address in (former, following):
            device.release(address, 8)

    @pytest.mark.parametrize(
        ("call", "at"), [("map", 6), ("allow_access", 2), ("copy_in", 2), ("copy_in", 1)]
    )
    def test_a_failure_leaves_nothing_mapped(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer, call: str, at: int
    ) -> None:
        address_range = device.reserve(10)
        driver.fail_at[call] = at
        with pytest.raises(CudaError):
            device.map_and_fill(address_range, [PageRun(0, 10)], snapshot.address)
        device.map(address_range, [PageRun(0, 10)])
        device.unmap(address_range, [PageRun(0, 10)])
        device.release(address_range, 10)

    def test_waiting_for_copies_counts_as_copying(
        self, device: CudaDevice, snapshot: HostBuffer
    ) -> None:
        address_range = device.reserve(4)
        device.map_and_fill(address_range, [PageRun(0, 4)], snapshot.address)
        before_s = device.spent.copy_s
        device.synchronize()
        assert device.spent.copy_s > before_s
        assert device.spent.map_s > 0
        device.unmap(address_range, [PageRun(0, 4)])
        device.release(address_range, 4)


class TestCopies:
    def test_copy_out_sees_what_kernels_wrote(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        address_range = device.reserve(1)
        device.map(address_range, [PageRun(0, 1)])
        driver.kernel_write(address_range, page_of(99))
        device.copy_out(snapshot.address, address_range, PAGE)
        device.synchronize()
        assert ctypes.string_at(snapshot.address, PAGE) == page_of(99)
        device.unmap(address_range, [PageRun(0, 1)])
        device.release(address_range, 1)

    def test_in_and_out_have_a_stream_each(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        device.pin(snapshot.address, snapshot.num_bytes)
        address_range = device.reserve(2)
        device.map(address_range, [PageRun(0, 2)])
        device.copy_in(address_range, snapshot.address, PAGE)
        device.copy_out(snapshot.address + PAGE, address_range + PAGE, PAGE)
        assert len(driver.busy_streams) == 2
        device.unmap(address_range, [PageRun(0, 2)])
        device.release(address_range, 2)


class TestZeroing:
    def test_kernels_wait_for_zeros_by_themselves(
        self, device: CudaDevice, driver: FakeCuda, snapshot: HostBuffer
    ) -> None:
        with mapped(device, 3) as address_range:
            device.copy_in(address_range, snapshot.address, 3 * PAGE)
            device.synchronize()
            device.zero(address_range + 7, PAGE)
            expected = page_of(0)[:7] + bytes(PAGE) + page_of(1)[7:] + page_of(2)
            assert driver.kernel_read(address_range, 3 * PAGE) == expected

    def test_the_thread_does_not_wait(self, device: CudaDevice, driver: FakeCuda) -> None:
        with mapped(device, 1) as address_range:
            waited = driver.calls["synchronize_stream"]
            device.zero(address_range, PAGE)
            assert driver.read(address_range, 1) != b"\0"
            assert driver.calls["synchronize_stream"] == waited

    def test_every_compute_stream_waits(self, driver: FakeCuda) -> None:
        streams: list[int] = [0]
        device = CudaDevice(
            0, 0, 0, page_bytes=PAGE, driver=driver, compute_streams=lambda: streams
        )
        streams.append(driver.create_stream())
        with mapped(device, 1) as address_range:
            for stream in streams:
                driver.kernel_write(address_range, b"x", stream)
                driver.synchronize_stream(stream)
                device.zero(address_range, PAGE)
                assert driver.kernel_read(address_range, PAGE, stream) == bytes(PAGE)
        device.close()

    def test_no_bytes_are_no_call(self, device: CudaDevice, driver: FakeCuda) -> None:
        with mapped(device, 1) as address_range:
            device.zero(address_range, 0)
            assert driver.calls["fill"] == 0


class TestPageTables:
    def test_pitfall_06_no_other_thread_touches_them(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        """The fake objects; see ``test_cuda_lanes`` for the threads that there are."""

        def reserve() -> None:
            driver.bind_thread()
            device.reserve(1)

        with pytest.raises(AssertionError, match="page tables are one thread's"):
            in_thread(reserve)


class TestNuma:
    def test_the_node_is_the_devices(
        self, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "node_of", {"0000:FF:1F.0": 3}.__getitem__)
        device = CudaDevice(0, 0, 0, page_bytes=PAGE, driver=driver)
        assert device.rank_nodes == (3,)
        device.close()

    def test_a_device_the_kernel_names_no_node_for(self, device: CudaDevice) -> None:
        assert device.rank_nodes == (-1,)


class TestAddresses:
    @pytest.mark.parametrize(("wanted", "limit", "found"), [(40, 64, 40), (40, 10, 10), (9, 1, 1)])
    def test_as_many_as_the_driver_has(
        self, device: CudaDevice, driver: FakeCuda, wanted: int, limit: int, found: int
    ) -> None:
        driver.most_reserved_bytes = limit * PAGE
        assert most_addressable(device, wanted) == found

    def test_a_load_fails_without_any(self, device: CudaDevice, driver: FakeCuda) -> None:
        driver.most_reserved_bytes = 0
        with pytest.raises(Failed, match=r"cannot reserve 4 KiB of addresses: .*out of memory"):
            most_addressable(device, 40)

    def test_another_error_ends_the_process(self, device: CudaDevice, driver: FakeCuda) -> None:
        driver.fail_at["reserve_addresses"] = 1
        with pytest.raises(CudaError):
            device.reserve(1)


class TestLending:
    def test_lent_memory_is_free_and_comes_back(self, device: CudaDevice, driver: FakeCuda) -> None:
        runs = [PageRun(3, 5), PageRun(20, 2)]
        device.release_memory(runs)
        assert device.free_bytes() == 7 * PAGE
        device.reclaim(runs)
        assert device.free_bytes() == 0
        address_range = device.reserve(5)
        device.map_and_fill(address_range, [PageRun(3, 5)], None)
        assert driver.kernel_read(address_range, 5 * PAGE) == bytes(5 * PAGE)
        device.unmap(address_range, [PageRun(3, 5)])
        device.release(address_range, 5)

    def test_a_lent_page_cannot_be_mapped(self, device: CudaDevice) -> None:
        device.release_memory([PageRun(3, 1)])
        address_range = device.reserve(1)
        with pytest.raises(AssertionError, match="is released"):
            device.map(address_range, [PageRun(3, 1)])
        device.release(address_range, 1)

    def test_memory_still_in_use_can_be_asked_for_again(
        self, device: CudaDevice, driver: FakeCuda
    ) -> None:
        device.release_memory([PageRun(0, 4)])
        driver.taken_bytes = PAGE
        with pytest.raises(CudaError, match="out of memory"):
            device.reclaim([PageRun(0, 4)])
        driver.taken_bytes = 0
        device.reclaim([PageRun(0, 4)])
