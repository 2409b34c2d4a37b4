"""``gpupool logs``: the end of each log and what comes, whichever file it is in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpupoold.admin import handlers
from gpupoold.admin.handlers import LogReader, follow_logs
from gpupoold.logs.files import RotatingFile


def numbered(first: int, last: int) -> list[str]:
    return [f"line {number:04d}" for number in range(first, last)]


def append(file: RotatingFile, lines: list[str]) -> None:
    for line in lines:
        file.write(f"{line}\n".encode())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "worker-0.log"


@pytest.mark.parametrize("num_per_file", [3, 4, 5, 100])
def test_following_goes_on_in_the_next_file(path: Path, num_per_file: int) -> None:
    file = RotatingFile(path, num_per_file * len("line 0000\n"))
    append(file, numbered(0, 2))
    with LogReader(path) as reader:
        assert reader.tail(100) == numbered(0, 2)
        seen = []
        for start in range(2, 50, 3):
            append(file, numbered(start, start + 3))
            seen += reader.new_lines() + reader.new_lines()
        assert seen == numbered(2, 50)
        assert reader.new_lines() == []
    file.close()


def test_a_tail_goes_back_into_the_file_before(path: Path) -> None:
    file = RotatingFile(path, 10 * len("line 0000\n"))
    append(file, numbered(0, 32))
    file.close()
    with LogReader(path) as reader:
        assert reader.tail(2) == numbered(30, 32)
        assert reader.tail(8) == numbered(24, 32)
        assert reader.tail(0) == []
        assert reader.new_lines() == []


def test_half_a_line_waits_for_its_end(path: Path) -> None:
    path.write_text("")
    with LogReader(path) as reader, path.open("a") as file:
        file.write("hal")
        file.flush()
        assert reader.new_lines() == []
        file.write("f\nnext")
        file.flush()
        assert reader.new_lines() == ["half"]


def test_a_file_that_became_shorter_starts_anew(path: Path) -> None:
    path.write_text("one\ntwo\n")
    with LogReader(path) as reader:
        path.write_text("3\n")
        assert reader.new_lines() == ["3"]


async def test_all_processes_in_one_stream(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handlers, "_POLL_S", 0)
    other = tmp_path / "frontend.log"
    other.write_text("old\n")
    file = RotatingFile(path, 30)
    batches = [numbered(0, 2), numbered(2, 4), [], []]

    async def is_gone() -> bool:
        append(file, batches.pop(0))
        return not batches

    paths = {"worker-0": path, "frontend": other}
    lines = [json.loads(line) async for line in follow_logs(paths, 5, follow=True, is_gone=is_gone)]
    file.close()
    assert lines == [
        {"process": "frontend", "line": "old"},
        *({"process": "worker-0", "line": f"line {number:04d}"} for number in range(4)),
    ]
