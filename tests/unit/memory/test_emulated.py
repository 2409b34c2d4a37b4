"""The emulated device: bytes stay with physical pages, unmapped addresses fault."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from gpupoold.memory import libc
from gpupoold.memory.emulated import EmulatedDevice, ModelledDriver, default_page_bytes
from gpupoold.memory.host_buffer import HostBuffer
from gpupoold.memory.libc import available_bytes, create_memfd
from gpupoold.memory.pages import PageRun
from tests.unit.descriptors import open_descriptors, opened_since
from tests.unit.memory.rig import PAGE, Rig, pattern, read, write


def test_bytes_belong_to_physical_pages(rig: Rig) -> None:
    first, second = rig.device.reserve(8), rig.device.reserve(8)
    runs = [PageRun(3, 2), PageRun(0, 1)]
    rig.device.map(first, runs)
    data = pattern("a", 3 * PAGE)
    write(first, data)
    rig.device.unmap(first, runs)
    elsewhere = [PageRun(0, 1), PageRun(3, 2)]
    rig.device.map(second + PAGE, elsewhere)
    assert read(second + PAGE, 3 * PAGE) == data[2 * PAGE :] + data[: 2 * PAGE]
    rig.device.unmap(second + PAGE, elsewhere)
    rig.device.release(first, 8)
    rig.device.release(second, 8)


def test_runs_may_be_unmapped_in_other_pieces_than_mapped(rig: Rig) -> None:
    address = rig.device.reserve(4)
    rig.device.map(address, [PageRun(0, 2)])
    rig.device.map(address + 2 * PAGE, [PageRun(2, 2)])
    data = pattern("b", 4 * PAGE)
    write(address, data)
    rig.device.unmap(address, [PageRun(0, 4)])
    rig.device.map(address, [PageRun(0, 4)])
    assert read(address, 4 * PAGE) == data
    rig.device.unmap(address + PAGE, [PageRun(1, 2)])
    assert read(address, PAGE) == data[:PAGE]
    assert read(address + 3 * PAGE, PAGE) == data[3 * PAGE :]
    rig.device.unmap(address, [PageRun(0, 1)])
    rig.device.unmap(address + 3 * PAGE, [PageRun(3, 1)])
    rig.device.release(address, 4)


def test_whole_page_tables_move_with_their_bytes() -> None:
    """What begins and ends within a table moves entry by entry, the tables between as such."""
    page_bytes = 64 << 10
    device = EmulatedDevice(4 * (2 << 20), page_bytes)
    assert device.table_pages == 32
    address = device.reserve(128)
    assert address % (2 << 20) == 0
    for first, at in ((5, 5), (37, 5), (5, 6), (0, 0)):
        runs, start = [PageRun(first, 80)], address + at * page_bytes
        device.map(start, runs)
        data = pattern(f"{first} {at}", 80 * page_bytes)
        write(start, data)
        device.unmap(start, runs)
        device.map(address, runs)
        assert read(address, 80 * page_bytes) == data
        device.unmap(address, runs)
    device.release(address, 128)
    device.close()


def test_map_and_fill_zeroes_or_copies(rig: Rig) -> None:
    rig.soil()
    source = HostBuffer.create("source", 4 * PAGE)
    data = pattern("c", 4 * PAGE)
    write(source.address, data)
    address = rig.device.reserve(4)
    runs = [PageRun(10, 1), PageRun(20, 3)]
    rig.device.map_and_fill(address, runs, source.address)
    assert read(address, 4 * PAGE) == data
    rig.device.unmap(address, runs)
    rig.device.map_and_fill(address, runs, None)
    assert read(address, 4 * PAGE) == bytes(4 * PAGE)
    assert rig.device.spent.map_s > 0
    assert rig.device.spent.copy_s > 0
    rig.device.unmap(address, runs)
    rig.device.release(address, 4)
    source.close()


def test_large_copies_in_two_threads_are_whole() -> None:
    page_bytes, num_pages = 64 << 10, 160  # 10 MiB: over the limit for one thread
    rig = Rig(num_pages, 0, page_bytes)
    num_bytes = num_pages * page_bytes - 12_345
    source = HostBuffer.create("source", num_pages * page_bytes)
    target = HostBuffer.create("target", num_pages * page_bytes)
    data = os.urandom(num_bytes)
    write(source.address, data)
    address = rig.device.reserve(num_pages)
    rig.device.map_and_fill(address, [PageRun(0, num_pages)], source.address)
    rig.device.copy_out(target.address, address, num_bytes)
    assert read(target.address, num_bytes) == data
    write(source.address, data[::-1])
    rig.device.copy_in(address, source.address, num_bytes)
    rig.device.synchronize()
    assert read(address, num_bytes) == data[::-1]
    rig.device.unmap(address, [PageRun(0, num_pages)])
    rig.device.release(address, num_pages)
    source.close()
    target.close()
    rig.close()


def test_a_map_that_fails_half_way_maps_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    address = rig.device.reserve(3)
    real, calls = libc.move_pages, []

    def fail_second(source: int, target: int, num_bytes: int) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise OSError(12, "no more mappings")
        real(source, target, num_bytes)

    runs = [PageRun(0, 1), PageRun(5, 1), PageRun(9, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(libc, "move_pages", fail_second)
        with pytest.raises(OSError, match="no more mappings"):
            rig.device.map(address, runs)
    data = pattern("d", 3 * PAGE)
    rig.device.map(address, runs)
    write(address, data)
    assert read(address, 3 * PAGE) == data
    rig.device.unmap(address, runs)
    rig.device.release(address, 3)


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param("", id="reserved"),
        pytest.param(
            "device.map(address, [PageRun(0, 2)]); device.unmap(address, [PageRun(0, 2)])",
            id="unmapped",
        ),
        pytest.param("device.map(address + 4096, [PageRun(0, 1)])", id="beside"),
    ],
)
@pytest.mark.parametrize("access", ["string_at(address, 1)", "memset(address, 1, 1)"])
def test_touching_an_unmapped_page_faults(
    touch: str, access: str, project_env: dict[str, str]
) -> None:
    assert run_script(touch, access, project_env) == -11


def test_touching_a_mapped_page_does_not_fault(project_env: dict[str, str]) -> None:
    mapped = "device.map(address, [PageRun(0, 1)])"
    assert run_script(mapped, "memset(address, 1, 4096)", project_env) == 0


def run_script(setup: str, access: str, env: dict[str, str]) -> int:
    script = textwrap.dedent(
        f"""
        import ctypes, resource
        from gpupoold.memory.pages import PageRun
        from gpupoold.memory.emulated import EmulatedDevice
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        device = EmulatedDevice(16384, 4096)
        address = device.reserve(4)
        {setup}
        ctypes.{access}
        """
    )
    return subprocess.run([sys.executable, "-c", script], env=env, check=False).returncode


def test_sizes() -> None:
    device = EmulatedDevice(10 * PAGE + 7, PAGE)
    assert (device.num_pages, device.page_bytes) == (10, PAGE)
    assert device.is_host_addressable
    device.close()
    default = EmulatedDevice(1 << 20)
    assert (default.num_pages, default.page_bytes) == (16, 64 << 10)
    default.close()


def test_large_devices_get_larger_pages() -> None:
    assert default_page_bytes(1 << 30) == 64 << 10
    for shift in range(20, 41):
        page_bytes = default_page_bytes(1 << shift)
        assert page_bytes >= 64 << 10
        assert 2 * ((1 << shift) // page_bytes) < 60_000  # a page and a gap: two mappings


def test_more_memory_than_there_is_is_refused() -> None:
    too_much = 2 * available_bytes()
    fds = open_descriptors()
    with pytest.raises(OSError, match="gpupool-device"):
        EmulatedDevice(too_much)
    with pytest.raises(OSError, match="snapshot"):
        HostBuffer.create("snapshot", too_much)
    assert not opened_since(fds)


def test_failing_memfd_is_closed() -> None:
    fds = open_descriptors()
    with pytest.raises(OSError, match="Invalid argument"):
        create_memfd("empty", 0)
    assert not opened_since(fds)


def test_closing_leaves_nothing() -> None:
    fds, mappings = open_descriptors(), num_mappings()
    Rig().close()
    assert not opened_since(fds)
    assert num_mappings() <= mappings + 4  # thread stacks may be kept by the C library


def test_libc_errors_name_the_call() -> None:
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
    with pytest.raises(OSError, match="mmap of 0 bytes"):
        libc.mmap(None, 0, libc.PROT_READ_WRITE, flags, -1, 0)
    with pytest.raises(OSError, match="mmap of 4096 bytes") as bad_fd:
        libc.mmap(None, PAGE, libc.PROT_READ_WRITE, libc.MAP_SHARED, -1, 0)
    assert bad_fd.value.errno == 9
    with pytest.raises(OSError, match="munmap of 4096 bytes"):
        libc.munmap(1, PAGE)
    with pytest.raises(OSError, match="mremap of 4096 bytes"):
        libc.move_pages(PAGE + 1, 0, PAGE)


def test_libc_copies() -> None:
    flags = libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
    address = libc.mmap(None, 2 * PAGE, libc.PROT_READ_WRITE, flags, -1, 0)
    libc.memset(address, 7, PAGE)
    libc.memcpy(address + PAGE, address, PAGE)
    assert read(address + PAGE, PAGE) == b"\x07" * PAGE
    libc.munmap(address, 2 * PAGE)


def num_mappings() -> int:
    with open("/proc/self/maps") as maps:
        return sum(1 for _ in maps)


class TestModelledDriver:
    def test_launches_of_all_workers_wait_while_memory_is_pinned(self, tmp_path: Path) -> None:
        pins, launches = (ModelledDriver(PAGE / 0.3, lock=tmp_path / "lock") for _ in range(2))
        has_pinned = threading.Event()

        def pin() -> None:
            pins.register_host(0, PAGE)
            has_pinned.set()

        launches.wait()
        thread = threading.Thread(target=pin)
        thread.start()
        while not pins._locks[1].locked():
            time.sleep(0.001)
        launches.wait()
        thread.join(0.1)
        assert has_pinned.is_set()
        for driver in (pins, launches):
            driver.close()

    def test_more_than_its_limit_is_refused(self) -> None:
        driver = ModelledDriver(1e12, limit_bytes=3 * PAGE)
        driver.register_host(0, 2 * PAGE)
        with pytest.raises(RuntimeError, match="pins at most 12 KiB"):
            driver.register_host(1 << 30, 2 * PAGE)
        driver.unregister_host(0)
        driver.register_host(1 << 30, 3 * PAGE)

    def test_copies_are_right_whatever_is_pinned(self) -> None:
        """Of 40 MiB the first half is pinned, the rest passes through buffers of 8 MiB."""
        num_pages, page_bytes = 10, 4 << 20
        driver = ModelledDriver(1e12, limit_bytes=20 << 20)
        device = EmulatedDevice(num_pages * page_bytes, page_bytes, driver=driver)
        host = HostBuffer.create("test", num_pages * page_bytes)
        data = pattern("w", host.num_bytes)
        write(host.address, data)
        device.pin(host.address, 20 << 20)
        address = device.reserve(num_pages)
        device.map_and_fill(address, [PageRun(0, num_pages)], host.address)
        assert read(address, host.num_bytes) == data
        write(host.address, bytes(host.num_bytes))
        device.copy_out(host.address, address, host.num_bytes)
        assert read(host.address, host.num_bytes) == data
        device.pin_later(host.address + (20 << 20), 20 << 20)
        device.set_live(True)
        assert device.unpinned().num_bytes >= 20 << 20
        device.unmap(address, [PageRun(0, num_pages)])
        device.release(address, num_pages)
        device.close()
        host.close()
