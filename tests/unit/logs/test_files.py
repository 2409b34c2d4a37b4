"""Log files of bounded size, written by children that say much, crash or are killed."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gpupoold.logs.files import NUM_OLD_FILES, LogPipe, RotatingFile, old_file, rotating_handler

FILE_BYTES = 1 << 20
TIMEOUT_S = 60
FLOOD = """
import os
line = b"x" * 99 + b"\\n"
for _ in range(500):
    os.write(2, line * 1000)
os.write(2, b"the end\\n")
"""
# The C library's own words, written to the descriptor by no Python.
CRASH = """
import ctypes, faulthandler
faulthandler.enable()
ctypes.CDLL(None).write(2, b"native words\\n", 13)
ctypes.string_at(0)
"""


def files_of(path: Path) -> list[Path]:
    """Oldest first."""
    numbered = [old_file(path, number) for number in range(NUM_OLD_FILES + 1, 0, -1)]
    return [file for file in (*numbered, path) if file.exists()]


def written(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in files_of(path))


def run(pipe: LogPipe, code: str) -> int:
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdout=pipe.write_fd, stderr=pipe.write_fd
    )
    pipe.close_writing()
    status = child.wait(TIMEOUT_S)
    pipe.finish().result(TIMEOUT_S)
    return status


def test_a_flood_stays_within_the_bound_and_its_end_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "flood.log"
    assert run(LogPipe(path, FILE_BYTES), FLOOD) == 0  # 50 MB
    files = files_of(path)
    assert len(files) == NUM_OLD_FILES + 1 == len(list(tmp_path.iterdir()))
    assert all(0 < file.stat().st_size <= FILE_BYTES for file in files)
    assert path.read_bytes().endswith(b"x\nthe end\n")
    assert set(b"".join(file.read_bytes() for file in files)) == set(b"x\nthe end")


def test_what_a_crash_says_arrives(tmp_path: Path) -> None:
    path = tmp_path / "crash.log"
    path.write_bytes(b"of the last life\n")
    assert run(LogPipe(path), CRASH) < 0
    text = path.read_text()
    assert text.startswith("of the last life\nnative words\n")
    assert "Fatal Python error: Segmentation fault" in text


def test_a_process_left_behind_keeps_nobody_waiting(tmp_path: Path) -> None:
    path = tmp_path / "left.log"
    leaver = """
import subprocess, sys
print("I leave", flush=True)
subprocess.Popen(["sleep", "600"], stdin=0)
"""
    pipe = LogPipe(path)
    child = subprocess.Popen(
        [sys.executable, "-c", leaver], stdout=pipe.write_fd, start_new_session=True
    )
    pipe.close_writing()
    assert child.wait(TIMEOUT_S) == 0
    try:
        pipe.finish().result(TIMEOUT_S)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
    assert path.read_text() == "I leave\n"


def test_a_full_disk_stops_no_child(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert run(LogPipe(Path("/dev/full")), FLOOD) == 0
    [record] = caplog.records
    assert "cannot write /dev/full, so log lines are lost: " in record.getMessage()


@pytest.mark.parametrize("line_bytes", [1, 7, 10, 11, 25])
def test_lines_stay_whole_unless_they_are_too_long(tmp_path: Path, line_bytes: int) -> None:
    path = tmp_path / "a.log"
    file = RotatingFile(path, 10)
    line = b"x" * (line_bytes - 1) + b"\n"
    for _ in range(4):
        file.write(line)
    file.write(line * 2)
    file.close()
    assert (line * 6).endswith(written(path))
    assert all(file.stat().st_size <= 10 for file in files_of(path))
    if line_bytes <= 10:
        assert all(file.read_bytes().endswith(b"\n") for file in files_of(path))


def test_a_file_that_cannot_be_moved_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    file = RotatingFile(path, 10)
    file.write(b"12345678\n")
    in_the_way = old_file(path, NUM_OLD_FILES)
    in_the_way.mkdir()
    (in_the_way / "something").touch()
    old_file(path, NUM_OLD_FILES - 1).touch()  # which does not replace a folder
    with pytest.raises(OSError, match="directory"):
        file.write(b"lost\n")
    (in_the_way / "something").unlink()
    in_the_way.rmdir()
    file.write(b"87654321\n")
    file.close()
    assert written(path) == b"12345678\n87654321\n"


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        LogPipe(tmp_path / "nowhere" / "a.log")


def test_without_descriptors_nothing_is_left_open(tmp_path: Path) -> None:
    script = """
import os, resource, sys, time
from pathlib import Path
from gpupoold.logs.files import LogPipe

def num_open():
    return len(os.listdir("/proc/self/fd"))

_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
before, num_failed = num_open(), 0
for spare in range(5):
    resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + spare, most))
    try:
        pipe = LogPipe(Path(sys.argv[1]))
    except OSError:
        num_failed += 1
    else:
        pipe.close_writing()
        pipe.finish().result(60)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    deadline_s = time.monotonic() + 60
    while num_open() != before:  # the last one is closed by the thread
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
print(num_failed)
"""
    command = [sys.executable, "-c", script, str(tmp_path / "a.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "4\n"


def test_the_daemons_own_file_is_bounded(tmp_path: Path) -> None:
    handler = rotating_handler(tmp_path / "gpupoold.log")
    handler.setLevel(logging.INFO)
    record = logging.makeLogRecord({"msg": "x" * 1_000_000, "levelno": logging.INFO})
    for _ in range(100):
        handler.handle(record)
    handler.close()
    files = list(tmp_path.iterdir())
    assert len(files) == NUM_OLD_FILES + 1
    assert max(file.stat().st_size for file in files) <= 16 << 20


def test_logs_are_private(tmp_path: Path) -> None:
    paths = [tmp_path / "gpupoold.log", tmp_path / "worker-0.log"]
    paths[0].write_text("written by another program")
    paths[0].chmod(0o644)
    rotating_handler(paths[0]).close()
    RotatingFile(paths[1]).close()
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]
    assert paths[0].read_text() == "written by another program"
