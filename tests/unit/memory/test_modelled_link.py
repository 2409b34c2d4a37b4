"""Copies over a modelled link arrive when the link would have carried them."""

from __future__ import annotations

from ctypes import addressof, create_string_buffer

import pytest

from gpupoold.memory.device import Copy, Direction
from gpupoold.memory.emulated import EmulatedDevice, LinkCopyStream, ModelledLink
from gpupoold.memory.pages import PageRun

RATE = 1000.0


class Time:
    def __init__(self) -> None:
        self.now_s = 10.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def link(time: Time) -> ModelledLink:
    return ModelledLink(RATE, lambda: time.now_s, time.sleep)


@pytest.fixture
def copy() -> Copy:
    source, target = create_string_buffer(b"x" * 500), create_string_buffer(500)
    buffers.append((source, target))
    return Copy(addressof(target), addressof(source), 500)


buffers: list[object] = []


def test_a_copy_takes_its_time_and_has_the_bytes(
    link: ModelledLink, time: Time, copy: Copy
) -> None:
    link.copy(*copy)
    assert time.now_s == pytest.approx(10.5)
    target = buffers[-1][1]  # type: ignore[index]
    assert bytes(target) == b"x" * 500


def test_copies_follow_each_other_without_gaps(link: ModelledLink, time: Time, copy: Copy) -> None:
    stream = LinkCopyStream(link)
    first, second = stream.begin([copy], 0), stream.begin([copy, copy], 0)
    assert time.now_s == 10.0
    stream.wait(first)
    assert time.now_s == pytest.approx(10.5)
    stream.wait(second)
    assert time.now_s == pytest.approx(11.5)
    stream.wait(second)
    assert time.now_s == pytest.approx(11.5)


def test_an_idle_link_saves_no_time_up(link: ModelledLink, time: Time, copy: Copy) -> None:
    link.copy(*copy)
    time.now_s += 100
    link.copy(*copy)
    assert time.now_s == pytest.approx(111.0)


def test_two_streams_share_the_link(link: ModelledLink, time: Time, copy: Copy) -> None:
    one, other = LinkCopyStream(link), LinkCopyStream(link)
    one.begin([copy], 0)
    other.begin([copy], 0)
    other.close()
    assert time.now_s == pytest.approx(11.0)


def test_a_device_has_a_link_each_way() -> None:
    device = EmulatedDevice(1 << 20, link_bytes_per_s=1 << 40)
    try:
        assert device.has_link
        assert len(device.open_copy_streams(Direction.IN)) == 1
        address, pages = device.reserve(1), device.page_bytes
        host = create_string_buffer(b"y" * pages, pages)
        device.map_and_fill(address, [PageRun(0, 1)], addressof(host))
        back = create_string_buffer(pages)
        device.copy_out(addressof(back), address, pages)
        assert bytes(back) == bytes(host)
        device.unmap(address, [PageRun(0, 1)])
        device.release(address, 1)
    finally:
        device.close()


def test_a_device_without_a_link_copies_with_the_hosts_cores() -> None:
    device = EmulatedDevice(1 << 20)
    assert not device.has_link
    device.close()
