"""Host memory of another worker, and being told that something is there."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupoold.errors import Failed
from gpupoold.memory.emulated import EmulatedDevice
from gpupoold.memory.host import HostSlot, KvHostCache
from gpupoold.memory.transfers import Arrival, DeviceThread, PeerCache
from tests.unit.memory.rig import PAGE, pattern, read, write

WAIT_S = 30.0


class PinningDevice(EmulatedDevice):
    """Keeps what is pinned; its copies want pinned memory, as a GPU's do."""

    is_host_addressable = False

    def __init__(self) -> None:
        super().__init__(PAGE, PAGE)
        self.pinned: list[tuple[int, int]] = []
        self.may_share = threading.Event()
        self.may_share.set()
        self.is_refusing = False

    def pin_later(self, address: int, num_bytes: int) -> None:
        self.pinned.append((address, num_bytes))

    def share_host(self, address: int, num_bytes: int, fd: int) -> None:
        assert self.may_share.wait(WAIT_S)
        if self.is_refusing:
            raise Failed("rank 1 has too few addresses")

    def unpin(self, address: int, num_bytes: int) -> None:
        self.pinned.remove((address, num_bytes))


@pytest.fixture
def device() -> Iterator[PinningDevice]:
    opened = PinningDevice()
    yield opened
    opened.close()
    assert opened.pinned == []


@pytest.fixture
def thread(device: PinningDevice) -> Iterator[DeviceThread]:
    made = DeviceThread(device, "peers")
    yield made
    made.close()


@pytest.fixture
def cache() -> Iterator[KvHostCache]:
    made = KvHostCache(16 * PAGE, slab_bytes=PAGE)
    yield made
    assert made.used_bytes == 0
    made.close()


def is_mapped(address: int) -> bool:
    """Return whether something is mapped at an address of this process."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()
    ]
    return any(int(start, 16) <= address < int(end, 16) for start, end in spans)


def wait_for(thread: DeviceThread) -> None:
    """Return when what the thread was given has been done."""
    thread.submit(int).result(WAIT_S)


def filled(cache: KvHostCache, num_blocks: int, key: object) -> tuple[HostSlot, bytes]:
    """A slot of blocks of a page, and its bytes."""
    slot = cache.allocate(PAGE, num_blocks)
    assert slot is not None
    data, at = pattern(key, slot.num_bytes), 0
    for address, num_bytes in slot.pieces():
        write(address, data[at : at + num_bytes])
        at += num_bytes
    return slot, data


class TestPeerCache:
    def test_its_slots_are_the_others_bytes(
        self, cache: KvHostCache, device: PinningDevice, thread: DeviceThread
    ) -> None:
        (first, _), (slot, data), (last, _) = (filled(cache, n, n) for n in (1, 3, 2))
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        freed: list[str] = []
        there = peer.slot(list(slot.blocks.extents), lambda: freed.append("once"))
        assert there.num_bytes == 3 * PAGE
        laid = list(there.beside([(1000, PAGE), (9000, 2 * PAGE)]))
        assert sum(num_bytes for _, _, num_bytes in laid) == 3 * PAGE
        assert b"".join(read(host, num_bytes) for _, host, num_bytes in laid) == data
        write(slot.pieces()[0][0], b"now")  # the same memory, not a copy
        assert read(laid[0][1], 3) == b"now"
        there.free()
        assert freed == ["once"]
        peer.leave()
        for one in (first, slot, last):
            one.free()

    def test_it_is_there_as_long_as_anything_is_used(
        self, cache: KvHostCache, device: PinningDevice, thread: DeviceThread
    ) -> None:
        """A worker that died has told all that it had; what arrived from it is used."""
        slots = [filled(cache, 2, n) for n in range(2)]
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        wait_for(thread)
        [(address, num_bytes)] = device.pinned
        assert num_bytes == cache.budget_bytes
        there = [peer.slot(list(slot.blocks.extents), lambda: None) for slot, _ in slots]
        peer.leave()
        there[0].free()
        assert device.pinned == [(address, num_bytes)]
        laid = there[1].beside([(0, 2 * PAGE)])
        assert b"".join(read(host, length) for _, host, length in laid) == slots[1][1]
        there[1].free()
        wait_for(thread)
        assert device.pinned == []
        assert not is_mapped(address)
        for slot, _ in slots:
            slot.free()

    def test_its_bytes_outlive_who_made_them(
        self, device: PinningDevice, thread: DeviceThread
    ) -> None:
        cache = KvHostCache(4 * PAGE, slab_bytes=PAGE)
        slot, data = filled(cache, 2, "late")
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        there = peer.slot(list(slot.blocks.extents), lambda: None)
        cache.close()
        laid = there.beside([(0, 2 * PAGE)])
        assert b"".join(read(host, length) for _, host, length in laid) == data
        there.free()
        peer.leave()

    def test_it_owns_the_descriptor_even_if_it_cannot_map_it(
        self, device: PinningDevice, thread: DeviceThread
    ) -> None:
        fd = os.memfd_create("empty")
        with pytest.raises(OSError, match="mmap of 0 bytes"):
            PeerCache(fd, 0, device, thread)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


class TestPeerCacheOfAGroup:
    """Mapping takes time: nothing waits for it, and nothing needs it."""

    @pytest.fixture(autouse=True)
    def group(self, device: PinningDevice) -> None:
        device.num_ranks = 2

    def test_it_is_usable_when_all_ranks_have_it(
        self, cache: KvHostCache, device: PinningDevice, thread: DeviceThread
    ) -> None:
        device.may_share.clear()
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        assert not peer.is_usable
        device.may_share.set()
        wait_for(thread)
        assert peer.is_usable
        peer.leave()

    def test_a_rank_cannot_map_it(
        self,
        cache: KvHostCache,
        device: PinningDevice,
        thread: DeviceThread,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        device.is_refusing = True
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        wait_for(thread)
        assert not peer.is_usable
        assert "cannot be mapped: rank 1 has too few addresses" in caplog.text
        assert "requests that migrate from that worker recompute their KV" in caplog.text
        peer.leave()

    def test_left_while_it_is_being_mapped(
        self, cache: KvHostCache, device: PinningDevice, thread: DeviceThread
    ) -> None:
        """``leave`` returns at once; the memory is unmapped later."""
        device.may_share.clear()
        peer = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        second = PeerCache(os.dup(cache.fd), cache.budget_bytes, device, thread)
        peer.leave()
        second.leave()
        device.may_share.set()
        wait_for(thread)
        assert device.pinned == []


class TestArrival:
    @pytest.mark.parametrize(
        ("told", "has_arrived"),
        [
            ([True], True),
            ([False], False),
            ([True, False], False),
            ([False, True], False),
            ([False, False], False),
        ],
        ids=str,
    )
    def test_told_by_another_process(
        self, project_env: dict[str, str], told: list[bool], has_arrived: bool
    ) -> None:
        """Whatever fails anywhere, bytes that may not be there are not taken for there."""
        arrival = Arrival()
        assert not arrival.is_signalled()
        assert not arrival.has_arrived()
        code = (
            "import sys; from gpupoold.memory.transfers import Arrival\n"
            "arrival = Arrival(int(sys.argv[1]))\n"
            f"for has_arrived in {told}: arrival.signal(has_arrived)\n"
        )
        subprocess.run(
            [sys.executable, "-c", code, str(arrival.fd)],
            pass_fds=(arrival.fd,),
            env=project_env,
            check=True,
            timeout=WAIT_S,
        )
        assert select.select([arrival.fd], [], [], 0)[0] == [arrival.fd]
        assert (arrival.is_signalled(), arrival.has_arrived()) == (True, has_arrived)
        assert (arrival.is_signalled(), arrival.has_arrived()) == (True, has_arrived)  # it stays so
        arrival.close()

    @pytest.mark.parametrize("has_arrived", [True, False])
    def test_another_process_is_woken(self, project_env: dict[str, str], has_arrived: bool) -> None:
        arrival = Arrival()
        code = (
            "import select, sys; from gpupoold.memory.transfers import Arrival\n"
            "arrival = Arrival(int(sys.argv[1]))\n"
            "print(arrival.is_signalled(), flush=True)\n"
            "select.select([arrival.fd], [], [])\n"
            "print(arrival.is_signalled(), arrival.has_arrived(), flush=True)\n"
        )
        with subprocess.Popen(
            [sys.executable, "-c", code, str(arrival.fd)],
            pass_fds=(arrival.fd,),
            env=project_env,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "False\n"
            arrival.signal(has_arrived)
            assert process.communicate(timeout=WAIT_S)[0] == f"True {has_arrived}\n"
        arrival.close()

    def test_what_is_told_later_changes_nothing(self) -> None:
        """Whoever has seen that the bytes are there may be using them."""
        arrival = Arrival()
        arrival.signal(True)
        assert arrival.has_arrived()
        arrival.signal(False)
        assert arrival.has_arrived()
        arrival.close()
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(arrival.fd)

    def test_a_new_one_is_not_inherited(self) -> None:
        arrival = Arrival()
        assert not os.get_inheritable(arrival.fd)
        arrival.close()
