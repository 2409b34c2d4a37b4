"""Where a device hangs and where new memory comes from; shared memory with all its pages."""

from __future__ import annotations

import errno
import logging
import os
import platform
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpupoold.memory import libc
from gpupoold.memory.libc import node_of, num_nodes, prefer_node

SIZE = 8192


@pytest.fixture(autouse=True)
def _fresh_warning() -> None:
    libc._warn_once.cache_clear()


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    """A thread whose policy may be changed: it ends with the test."""
    with ThreadPoolExecutor(1) as pool:
        yield pool


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

    def test_the_kernel_knows_it_until_it_ends(self, thread: ThreadPoolExecutor) -> None:
        def run() -> None:
            try:
                before = libc.get_mempolicy()
            except OSError as refused:
                pytest.skip(f"this machine forbids it: {refused}")
            with prefer_node(0):
                assert libc.get_mempolicy() == (libc.MPOL_PREFERRED, 1 << 0)
                with prefer_node(0):
                    pass
                assert libc.get_mempolicy() == (libc.MPOL_PREFERRED, 1 << 0)
            assert libc.get_mempolicy() == before

        thread.submit(run).result()

    def test_it_ends_with_an_error_too(self, thread: ThreadPoolExecutor) -> None:
        def run() -> None:
            before = libc.get_mempolicy()
            with pytest.raises(KeyError), prefer_node(0):
                raise KeyError
            assert libc.get_mempolicy() == before

        thread.submit(run).result()

    def test_other_threads_are_not_concerned(self, thread: ThreadPoolExecutor) -> None:
        before = libc.get_mempolicy()

        def run() -> None:
            with prefer_node(0):
                pass

        thread.submit(run).result()
        assert libc.get_mempolicy() == before

    @pytest.mark.parametrize("refused", ["get_mempolicy", "set_mempolicy"])
    def test_a_refused_call_is_logged_once_and_harmless(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refused: str
    ) -> None:
        def refuse(*_: int) -> tuple[int, int]:
            raise OSError(errno.EPERM, f"{refused}: Operation not permitted")

        monkeypatch.setattr(libc, refused, refuse)
        with caplog.at_level(logging.WARNING):
            for _ in range(3):
                with prefer_node(1):
                    pass
        [record] = caplog.records
        assert f"{refused}: Operation not permitted" in record.getMessage()

    def test_a_node_that_is_not_there_is_harmless(
        self, thread: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
    ) -> None:
        def run() -> None:
            before = libc.get_mempolicy()
            with prefer_node(1000):
                assert libc.get_mempolicy() == before

        thread.submit(run).result()
        assert len(caplog.records) == 1

    def test_no_node_is_no_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(libc, "set_mempolicy")
        with prefer_node(-1):
            pass


def test_one_node_is_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libc, "num_nodes", lambda: 1)
    monkeypatch.delattr(libc, "set_mempolicy")
    with prefer_node(0):
        pass


def test_errors_name_the_call(thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OSError, match="set_mempolicy: Invalid argument"):
        thread.submit(libc.set_mempolicy, 99, 0).result()
    monkeypatch.setattr(platform, "machine", lambda: "sparc")
    with pytest.raises(OSError, match="get_mempolicy: no known system call number on sparc"):
        libc.get_mempolicy()


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
