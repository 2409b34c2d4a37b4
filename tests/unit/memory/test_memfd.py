"""Shared memory: all its pages are there, and stay."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpupoold.memory import libc

SIZE = 8192


def test_its_size_cannot_be_changed() -> None:
    fd = libc.create_memfd("test", SIZE)
    for num_bytes in (SIZE // 2, 2 * SIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, num_bytes)
    os.pwrite(fd, b"weights", SIZE - 7)
    status = os.fstat(fd)
    assert (status.st_size, status.st_blocks * 512) == (SIZE, SIZE)
    os.close(fd)


def test_more_than_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable: 4 kB\n")
    monkeypatch.setattr(libc, "_MEMINFO", meminfo)
    with pytest.raises(OSError, match="test needs 8 KiB, 4 KiB is available"):
        libc.create_memfd("test", SIZE)


def test_more_than_the_control_group_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: the machine has memory, and the kernel would kill the worker."""
    monkeypatch.setattr(libc, "memory_room_bytes", lambda: SIZE // 2)
    with pytest.raises(OSError, match="test needs 8 KiB, 4 KiB is available"):
        libc.create_memfd("test", SIZE)
    monkeypatch.setattr(libc, "memory_room_bytes", lambda: None)
    os.close(libc.create_memfd("test", SIZE))
