"""Snapshots on disk: what comes back, what counts as damage, what an interrupted save leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
from blake3 import blake3

from gpupoold.control.weights import snapshot_files
from gpupoold.control.weights.snapshot_files import SnapshotFiles
from gpupoold.errors import Failed
from gpupoold.memory import libc
from tests.unit.descriptors import open_descriptors, opened_since

MIB = 1 << 20
HEADER_BYTES = 4096
SELF_CHECK = (5, 0, 151_935)


def memfd_of(data: bytes) -> int:
    fd = os.memfd_create("snapshot")
    assert os.write(fd, data) == len(data)
    return fd


def save(files: SnapshotFiles, key: str, data: bytes) -> None:
    fd = memfd_of(data)
    try:
        files.save(key, fd, "layout", SELF_CHECK)
    finally:
        os.close(fd)


def loaded(files: SnapshotFiles, key: str) -> bytes | None:
    saved = files.load(key)
    if saved is None:
        return None
    try:
        return os.pread(saved.fd, saved.num_bytes + 1, 0)
    finally:
        os.close(saved.fd)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "state" / "snapshots"


@pytest.fixture
def files(folder: Path) -> SnapshotFiles:
    return SnapshotFiles(folder)


@pytest.fixture(autouse=True)
def no_leaked_descriptors() -> Iterator[None]:
    before = open_descriptors()
    yield
    assert not opened_since(before)


# Saving and loading


@pytest.mark.parametrize("num_bytes", [1, HEADER_BYTES, 16 * MIB, 2 * 16 * MIB + 12_345])
def test_an_snapshot_comes_back(files: SnapshotFiles, num_bytes: int) -> None:
    data = os.urandom(num_bytes)
    save(files, "k", data)
    saved = files.load("k")
    assert saved is not None
    assert (saved.num_bytes, saved.layout_digest, saved.self_check) == (
        num_bytes,
        "layout",
        SELF_CHECK,
    )
    assert not os.get_inheritable(saved.fd)
    assert os.readlink(f"/proc/self/fd/{saved.fd}").startswith("/memfd:")
    os.close(saved.fd)
    assert loaded(files, "k") == data


def test_the_snapshot_saved_stays_the_callers(files: SnapshotFiles) -> None:
    fd = memfd_of(b"weights")
    files.save("k", fd, "layout", SELF_CHECK)
    assert os.pread(fd, 100, 0) == b"weights"
    os.close(fd)


def test_a_loaded_snapshot_is_a_copy(files: SnapshotFiles) -> None:
    save(files, "k", b"weights")
    saved = files.load("k")
    assert saved is not None
    os.pwrite(saved.fd, b"W", 0)
    os.close(saved.fd)
    assert loaded(files, "k") == b"weights"


def test_none_is_there(
    files: SnapshotFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert files.load("k") is None
    assert files.list() == []
    files.drop("k")
    files.remove_others(list)
    assert not folder.exists()
    assert caplog.text == ""


def test_a_later_save_replaces_an_earlier_one(files: SnapshotFiles) -> None:
    save(files, "k", b"a longer old one")
    save(files, "k", b"new")
    assert loaded(files, "k") == b"new"


def test_only_the_owner_may_read(files: SnapshotFiles, folder: Path) -> None:
    old = os.umask(0)
    try:
        save(files, "k", b"weights")
    finally:
        os.umask(old)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert (folder / "k.snapshot").stat().st_mode & 0o777 == 0o600


def test_list_drop_and_remove_others(files: SnapshotFiles, folder: Path) -> None:
    for key, data in (("b", b"22"), ("a", b"1"), ("c", b"333")):
        save(files, key, data)
    (folder / "d.snapshot.new").write_bytes(b"what a killed daemon left")
    (folder / "a.snapshot").touch()
    os.utime(folder / "a.snapshot", (1000.0, 2000.5))
    found = files.list()
    assert [(file.key, file.num_bytes) for file in found] == [("a", 1), ("b", 2), ("c", 3)]
    assert found[0].saved_at == 2000.5
    files.drop("b")
    files.drop("b")
    assert [file.key for file in files.list()] == ["a", "c"]
    files.remove_others(lambda: ["c", "unknown"])
    assert os.listdir(folder) == ["c.snapshot"]
    assert loaded(files, "c") == b"333"


# Damage


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[offset] ^= 1
        path.write_bytes(data)

    return damage


def resize(num_bytes: int) -> Callable[[Path], None]:
    """Cut off or add that many bytes."""
    return lambda path: os.truncate(path, path.stat().st_size + num_bytes)


class Damage(NamedTuple):
    harm: Callable[[Path], None]
    reason: str


DAMAGES = {
    "first byte of data": Damage(flip(HEADER_BYTES), "the data has the checksum"),
    "last byte of data": Damage(flip(-1), "the data has the checksum"),
    "magic": Damage(flip(0), "the magic number of a snapshot is missing"),
    "checksum of the header": Damage(flip(20), "the header has a wrong checksum"),
    "text of the header": Damage(flip(60), "the header has a wrong checksum"),
    "padding of the header": Damage(flip(HEADER_BYTES - 1), "the header has a wrong checksum"),
    "one byte short": Damage(resize(-1), "8295 bytes instead of 8296"),
    "header only": Damage(resize(-4200), "4096 bytes instead of 8296"),
    "cut in the header": Damage(resize(-5000), "only 3296 bytes"),
    "longer": Damage(resize(1), "8297 bytes instead of 8296"),
    "empty": Damage(lambda path: os.truncate(path, 0), "only 0 bytes"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_deleted(
    files: SnapshotFiles, folder: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    save(files, "k", os.urandom(4200))
    save(files, "other", b"weights")
    path = folder / "k.snapshot"
    DAMAGES[name].harm(path)
    assert files.load("k") is None
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert str(path) in record.message
    assert DAMAGES[name].reason in record.message
    assert os.listdir(folder) == ["other.snapshot"]
    save(files, "k", b"again")
    assert loaded(files, "k") == b"again"


def test_another_format_is_deleted(
    files: SnapshotFiles,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encode = snapshot_files._encode
    other = lambda header: encode(msgspec.structs.replace(header, format=3))  # noqa: E731
    monkeypatch.setattr(snapshot_files, "_encode", other)
    save(files, "k", b"weights")
    assert files.load("k") is None
    assert "format 3, this gpupoold reads 2" in caplog.text
    assert os.listdir(folder) == []


def test_a_header_without_its_fields_is_deleted(
    files: SnapshotFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files, "k", b"weights")
    text = b'{"format":2}'.ljust(HEADER_BYTES - 48)
    with (folder / "k.snapshot").open("r+b") as file:
        file.seek(16)
        file.write(blake3(text).digest() + text)
    assert files.load("k") is None
    assert "invalid header" in caplog.text
    assert os.listdir(folder) == []


def test_an_snapshot_under_another_key_is_deleted(
    files: SnapshotFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(files, "k", b"weights")
    (folder / "k.snapshot").rename(folder / "l.snapshot")
    assert files.load("l") is None
    assert "saved under the key k" in caplog.text
    assert os.listdir(folder) == []


def test_a_file_cut_while_it_is_read_is_deleted(
    files: SnapshotFiles,
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(files, "k", bytes(2 * 16 * MIB + 1))

    def cut_and_create(name: str, num_bytes: int, _: object) -> int:
        os.truncate(folder / "k.snapshot", HEADER_BYTES + 20 * MIB)
        return libc.create_memfd(name, num_bytes)

    monkeypatch.setattr(snapshot_files, "create_memfd", cut_and_create)
    assert files.load("k") is None
    assert f"the file ends at byte {HEADER_BYTES + 20 * MIB}" in caplog.text
    assert os.listdir(folder) == []


def test_parts_are_read_to_the_nodes_of_their_gpus(
    files: SnapshotFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(libc, "prefer_node", lambda at, size, node: asked.append((size, node)))
    save(files, "k", bytes(2 * MIB))
    saved = files.load("k", (1, 0))
    assert saved is not None
    os.close(saved.fd)
    assert asked == [(MIB, 1), (MIB, 0)]


@pytest.mark.parametrize(
    ("mode", "is_touched"),
    [("always within_size [advise] never", True), ("always within_size advise [never]", False)],
)
def test_huge_pages_are_asked_for_where_the_kernel_has_them(
    files: SnapshotFiles,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    is_touched: bool,
) -> None:
    (tmp_path / "shmem_enabled").write_text(mode)
    monkeypatch.setattr(libc, "_SHARED_HUGE_PAGES", tmp_path / "shmem_enabled")
    asked = []
    monkeypatch.setattr(libc, "populate", lambda at, num_bytes: asked.append(num_bytes))
    save(files, "k", bytes(2 * MIB))
    assert loaded(files, "k") == bytes(2 * MIB)
    assert asked == ([2 * MIB] if is_touched else [])


def test_what_cannot_be_read_stays(
    files: SnapshotFiles, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "k.snapshot").mkdir(parents=True)
    assert files.load("k") is None
    assert "k.snapshot could not be read" in caplog.text
    assert (folder / "k.snapshot").is_dir()


def test_an_snapshot_larger_than_memory_stays(
    files: SnapshotFiles,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    save(files, "k", bytes(2 * MIB))
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemAvailable: 1024 kB\n")
    with monkeypatch.context() as patch:
        patch.setattr(libc, "_MEMINFO", meminfo)
        assert files.load("k") is None
    assert "gpupool-snapshot needs 2 MiB, 1 MiB is available" in caplog.text
    assert loaded(files, "k") == bytes(2 * MIB)


# A save that fails

INTERRUPTED = """
import json, os, resource, sys
from pathlib import Path
from gpupoold.errors import Failed
from gpupoold.control.weights.snapshot_files import SnapshotFiles

folder = Path(sys.argv[1])
fd = os.memfd_create("snapshot")
os.write(fd, os.urandom(3 << 20))
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
num_descriptors = len(os.listdir("/proc/self/fd"))
try:
    SnapshotFiles(folder).save("k", fd, "layout", ())
except Failed as error:
    leaked = len(os.listdir("/proc/self/fd")) - num_descriptors
    print(json.dumps([error.message, leaked]))
"""


def test_an_interrupted_save_leaves_nothing_new(
    files: SnapshotFiles, folder: Path, project_env: dict[str, str]
) -> None:
    save(files, "k", b"the one before")
    (folder / "k.snapshot.new").write_bytes(b"what a killed daemon left")
    command = [sys.executable, "-c", INTERRUPTED, str(folder)]
    done = subprocess.run(command, env=project_env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    message, num_leaked = json.loads(done.stdout)
    assert message.startswith(f"{folder}/k.snapshot: saving a snapshot of 3 MiB failed:")
    assert "File too large" in message
    assert num_leaked == 0
    assert os.listdir(folder) == ["k.snapshot"]
    assert loaded(files, "k") == b"the one before"


def test_a_full_disk_is_told_before_anything_is_written(
    files: SnapshotFiles, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = shutil._ntuple_diskusage(100 * MIB, 98 * MIB, 2 * MIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: free)
    with pytest.raises(Failed, match=r"k\.snapshot: a snapshot of 2 MiB .* 2 MiB are free") as e:
        save(files, "k", bytes(2 * MIB))  # the header is too much
    assert f"make space in {folder}" in e.value.hint
    assert os.listdir(folder) == []
    save(files, "k", bytes(2 * MIB - HEADER_BYTES))
    assert os.listdir(folder) == ["k.snapshot"]


@pytest.mark.parametrize(
    ("data", "self_check", "reason"),
    [(b"", (), "cannot mmap an empty file"), (b"weights", (1000,) * 1000, "the limit is 4096")],
)
def test_what_cannot_be_saved_leaves_nothing(
    files: SnapshotFiles, folder: Path, data: bytes, self_check: tuple[int, ...], reason: str
) -> None:
    fd = memfd_of(data)
    with pytest.raises(Failed, match=reason):
        files.save("k", fd, "layout", self_check)
    os.close(fd)
    assert os.listdir(folder) == []


def test_the_folder_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "snapshots").write_text("not a folder")
    with pytest.raises(Failed, match=r"snapshots/k\.snapshot: saving a snapshot of 7 B failed"):
        save(SnapshotFiles(tmp_path / "snapshots"), "k", b"weights")
