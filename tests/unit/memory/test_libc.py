"""Where a device hangs and where new memory comes from; shared memory with all its pages."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpupoold.memory import libc
from gpupoold.memory.libc import node_of, num_nodes

SIZE = 8192


@pytest.fixture(autouse=True)
def _fresh_warning() -> None:
    libc._warn_once.cache_clear()


@pytest.fixture
def fd() -> Iterator[int]:
    fd = libc.create_memfd("test", SIZE)
    yield fd
    os.close(fd)


class TestNodeOf:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        for name, node in (("0000:3b:00.0", "1\n"), ("0001:af:1f.7", "-1\n"), ("0000:01:00.0", "")):
            (tmp_path / name).mkdir()
            (tmp_path / name / "numa_node").write_text(node)
        return tmp_path

    @pytest.mark.parametrize("bus_id", ["0000:3B:00.0", "0000:3b:00.0", "00000000:3B:00.0"])
    def test_however_it_is_written(self, root: Path, bus_id: str) -> None:
        assert node_of(bus_id, root) == 1

    @pytest.mark.parametrize(
        "bus_id", ["0001:AF:1F.7", "0000:01:00.0", "0000:99:00.0", "nonsense", ""]
    )
    def test_none_is_minus_one(self, root: Path, bus_id: str) -> None:
        assert node_of(bus_id, root) == -1


def test_nodes_are_counted(tmp_path: Path) -> None:
    for name in ("node0", "node1", "node12", "online", "power"):
        (tmp_path / name).mkdir()
    assert num_nodes(tmp_path) == 3
    assert num_nodes(tmp_path / "nowhere") == 0


class TestPreferNode:
    @pytest.fixture(autouse=True)
    def _two_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libc, "num_nodes", lambda: 2)

    def test_the_kernel_knows_the_policy_of_each_part_for_all_mappings(self, fd: int) -> None:
        _skip_if_forbidden()
        libc.prefer_nodes(fd, SIZE, (libc.NO_NODE, 0))
        with mapped(fd) as address:
            assert policy_at(address) == (libc.MPOL_DEFAULT, 0)
            assert policy_at(address + SIZE // 2) == (libc.MPOL_PREFERRED, 1 << 0)

    def test_private_memory_has_a_policy_too(self) -> None:
        _skip_if_forbidden()
        with mapped() as address:
            libc.prefer_node(address, SIZE, 0)
            assert policy_at(address) == (libc.MPOL_PREFERRED, 1 << 0)

    def test_a_refused_call_is_logged_once_and_harmless(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fd: int
    ) -> None:
        def refuse(*_: int) -> None:
            raise OSError(errno.EPERM, "mbind: Operation not permitted")

        monkeypatch.setattr(libc, "mbind", refuse)
        with caplog.at_level(logging.WARNING):
            libc.prefer_nodes(fd, SIZE, (0, 1))
        [record] = caplog.records
        assert "mbind: Operation not permitted" in record.getMessage()

    def test_a_node_that_is_not_there_is_harmless(
        self, fd: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        libc.prefer_nodes(fd, SIZE, (1000,))
        assert len(caplog.records) == 1
        with mapped(fd) as address:
            libc.populate(address, SIZE)

    @pytest.mark.parametrize(("num_nodes", "node"), [(2, libc.NO_NODE), (1, 0)])
    def test_no_node_or_a_single_one_is_no_call(
        self, monkeypatch: pytest.MonkeyPatch, num_nodes: int, node: int
    ) -> None:
        monkeypatch.setattr(libc, "num_nodes", lambda: num_nodes)
        monkeypatch.delattr(libc, "mbind")
        libc.prefer_node(0, SIZE, node)


def test_errors_name_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    with mapped() as address, pytest.raises(OSError, match="mbind: Invalid argument"):
        libc.mbind(address, SIZE, 99, 0)
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    with pytest.raises(OSError, match="mbind: no known system call number on sparc"):
        libc.mbind(0, SIZE, libc.MPOL_DEFAULT, 0)


@contextmanager
def mapped(fd: int = -1) -> Iterator[int]:
    flags = libc.MAP_SHARED if fd >= 0 else libc.MAP_PRIVATE | libc.MAP_ANONYMOUS
    address = libc.mmap(None, SIZE, libc.PROT_READ_WRITE, flags, fd, 0)
    yield address
    libc.munmap(address, SIZE)


def policy_at(address: int) -> tuple[int, int]:
    """The mode and the nodes, a bit mask, of a page of memory."""
    number = {"x86_64": 239, "aarch64": 236}[platform.machine()]  # get_mempolicy
    mode, nodes = ctypes.c_int(), (ctypes.c_uint8 * 128)()
    at, of_address = ctypes.c_void_p(address), ctypes.c_ulong(2)
    size = ctypes.c_ulong(1024)
    assert libc._libc().syscall(number, ctypes.byref(mode), nodes, size, at, of_address) == 0
    return mode.value, int.from_bytes(nodes, "little")


def _skip_if_forbidden() -> None:
    with mapped() as address:
        try:
            libc.mbind(address, SIZE, libc.MPOL_DEFAULT, 0)
        except OSError as refused:
            pytest.skip(f"this machine forbids it: {refused}")


class TestNodesOf:
    @pytest.fixture(autouse=True)
    def _two_nodes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(libc, "num_nodes", lambda: 2)

    def test_the_pages_of_each_part_are_asked(self, fd: int) -> None:
        _skip_if_forbidden()
        nodes = libc.nodes_of(fd, SIZE, 2)
        assert len(nodes) == 2
        assert set(nodes) <= libc.node_bytes().keys()

    def test_a_memfd_that_cannot_be_mapped(self, fd: int) -> None:
        assert libc.nodes_of(fd, 1 << 60, 2) == (libc.NO_NODE, libc.NO_NODE)

    def test_most_pages_decide(self, monkeypatch: pytest.MonkeyPatch, fd: int) -> None:
        nodes = iter([3, *[1] * 9, *[2] * 6])

        def answer(which: int, node: Any, *_: object) -> None:
            node._obj.value = next(nodes)

        monkeypatch.setattr(libc, "_policy_call", answer)
        assert libc.most_used_node(1 << 40, 1 << 30) == 1

    @pytest.mark.parametrize(("num_nodes", "node"), [(0, libc.NO_NODE), (1, 0)])
    def test_a_machine_with_one_node_is_not_asked(
        self, monkeypatch: pytest.MonkeyPatch, num_nodes: int, node: int
    ) -> None:
        monkeypatch.setattr(libc, "num_nodes", lambda: num_nodes)
        monkeypatch.delattr(libc, "_policy_call")
        assert libc.most_used_node(1 << 40, 1 << 30) == node

    def test_a_machine_that_forbids_it(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fd: int
    ) -> None:
        def refuse(*_: object) -> None:
            raise OSError(errno.EPERM, "get_mempolicy: Operation not permitted")

        monkeypatch.setattr(libc, "_policy_call", refuse)
        assert libc.nodes_of(fd, SIZE, 2) == (libc.NO_NODE, libc.NO_NODE)
        assert len(caplog.records) == 1


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
