"""Buffers in host memory, and their pages."""

from __future__ import annotations

import os

import pytest

from gpupoold.memory import host_buffer, libc
from gpupoold.memory.host_buffer import HostBuffer, touch_pages
from tests.unit.memory.rig import PAGE, read, write


def test_a_buffer_is_zeroed_and_shared_by_its_descriptor() -> None:
    buffer = HostBuffer.create("snapshot", 3 * PAGE)
    assert read(buffer.address, 3 * PAGE) == bytes(3 * PAGE)
    write(buffer.address, b"abc")
    other = HostBuffer(os.dup(buffer.fd), 3 * PAGE)
    buffer.close()
    assert read(other.address, 3) == b"abc"
    other.close()


def test_closing_twice_harms_nobody() -> None:
    buffer = HostBuffer.create("snapshot", PAGE)
    buffer.close()
    later = HostBuffer.create("later", PAGE)  # likely the same descriptor and address
    buffer.close()
    write(later.address, b"still there")
    os.fstat(later.fd)
    later.close()


def test_a_buffer_that_cannot_be_mapped_closes_its_descriptor() -> None:
    fd = os.memfd_create("empty")
    with pytest.raises(OSError, match="mmap of 0 bytes"):
        HostBuffer(fd, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_pages_are_made_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "_PIECE_BYTES", 4 * PAGE)
    fd = os.memfd_create("sparse")
    os.ftruncate(fd, 9 * PAGE)
    os.pwrite(fd, b"there already", 6 * PAGE)
    touch_pages(fd, 9 * PAGE, (libc.NO_NODE,))
    assert os.fstat(fd).st_blocks * 512 == 9 * PAGE
    assert os.pread(fd, 13, 6 * PAGE) == b"there already"
    os.close(fd)


def test_pages_are_made_in_a_buffer_that_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffer, "_PIECE_BYTES", 4 * PAGE)
    buffer = HostBuffer.create("sparse", 9 * PAGE, is_populated=False)
    assert os.fstat(buffer.fd).st_blocks == 0
    libc.view(buffer.address, 9 * PAGE)[PAGE : PAGE + 5] = b"there"
    buffer.populate()
    assert os.fstat(buffer.fd).st_blocks * 512 == 9 * PAGE
    assert os.pread(buffer.fd, 5, PAGE) == b"there"
    buffer.close()
