"""One daemon per state folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpupool_state import StateLock
from gpupoold.errors import Failed, Refused

HOLD = """
import sys, time
from pathlib import Path
from gpupool_state import StateLock
lock = StateLock.acquire(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock of ``tmp_path``."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_second_process_is_refused_with_the_first_ones_pid(
    tmp_path: Path, other: subprocess.Popen[str]
) -> None:
    with pytest.raises(Refused, match=rf"in use by the process with pid {other.pid}\b") as error:
        StateLock.acquire(tmp_path)
    assert str(tmp_path) in error.value.message


def test_a_killed_holder_frees_the_folder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    with StateLock.acquire(tmp_path):
        assert int((tmp_path / "gpupoold.lock").read_text()) == os.getpid()


def test_release_lets_the_next_one_in(tmp_path: Path) -> None:
    lock = StateLock.acquire(tmp_path)
    with pytest.raises(Refused):
        StateLock.acquire(tmp_path)
    lock.release()
    lock.release()
    StateLock.acquire(tmp_path).release()


def test_children_do_not_keep_the_lock(tmp_path: Path) -> None:
    with StateLock.acquire(tmp_path):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        StateLock.acquire(tmp_path).release()
    finally:
        child.communicate(b"\n")


def test_a_missing_folder_is_made_for_its_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "var" / "gpupool"
    with StateLock.acquire(folder):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_a_stale_longer_pid_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "gpupoold.lock").write_text("9" * 15)
    with StateLock.acquire(tmp_path):
        assert int((tmp_path / "gpupoold.lock").read_text()) == os.getpid()


@pytest.mark.parametrize("kind", ["below a file", "no place for folders", "a link"])
def test_a_folder_that_cannot_be_used(tmp_path: Path, kind: str) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "gpupoold.lock").symlink_to(tmp_path / "file")
    folder = {
        "below a file": tmp_path / "file" / "state",
        "no place for folders": Path("/proc/gpupool"),
        "a link": tmp_path / "linked",
    }[kind]
    with pytest.raises(Failed, match="cannot be used") as caught:
        StateLock.acquire(folder)
    assert str(folder) in caught.value.message
    assert "mounted read-write" in caught.value.hint
