"""The runner: pieces that end, fail, hang or are not begun; what is kept of each."""

from __future__ import annotations

import json
import subprocess
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.gpu import machine, results
from benchmarks.gpu.pieces import Piece
from benchmarks.gpu.runner import (
    Runner,
    end_descendants,
    junit_figures,
    last_words,
    main,
    pack_logs,
)
from gpupoold.doctor.probe_host import memory_facts

_PIECE = """
import json, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
open(out, "w").write(json.dumps({"figures": {"a_s": {"measured": 1, "limit": 2, "reached": True}}}))
"""

TIDY = """
try:
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit('tidied up')
"""


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(machine, "hardware", lambda: {"gpu": None})
    monkeypatch.setattr(machine, "versions", dict)
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(machine.COMMIT_VARIABLE, "abc")
    for name, end in (
        ("good", ""),
        ("bad", "sys.exit('no luck')"),
        ("hung", "time.sleep(60)"),
        ("tidy", TIDY),
    ):
        (tmp_path / f"{name}.py").write_text(_PIECE + end + "\n")
    return Runner(tmp_path / "out", tmp_path / "scratch", 100.0, dry_kind="emulated")


def piece(name: str, limit_s: float = 20.0, least_s: float = 0.1) -> Piece:
    return Piece(name, (name,), limit_s, least_s)


def test_what_a_piece_found_is_kept_however_it_ends(runner: Runner, tmp_path: Path) -> None:
    late = piece("late", limit_s=500.0, least_s=200.0)
    runner.run([piece("bad"), piece("hung", limit_s=1.5), late, piece("good")], ["unasked"])
    kept: dict[str, Any] = json.loads((tmp_path / "out" / "results.json").read_text())
    outcomes = {name: one["outcome"] for name, one in kept["pieces"].items()}
    assert outcomes == {
        "unasked": results.NOT_ASKED_FOR,
        "bad": results.FAILED,
        "hung": results.TIMED_OUT,
        "late": results.NO_TIME,
        "good": results.DONE,
    }
    assert kept["pieces"]["bad"]["problem"] == "no luck"
    for name in ("bad", "hung", "good"):
        assert kept["pieces"][name]["figures"]["a_s"]["measured"] == 1
    assert (kept["is_dry_run"], kept["commit"]) == (True, "abc")
    assert {file.name for file in (tmp_path / "out").iterdir()} == {"results.json", "logs.tar.gz"}


def test_nothing_is_begun_after_a_failure_if_so_asked(runner: Runner) -> None:
    runner.run([piece("good"), piece("bad"), piece("hung")], [], fails_fast=True)
    outcomes = {name: one["outcome"] for name, one in runner.results["pieces"].items()}
    assert outcomes == {"good": results.DONE, "bad": results.FAILED, "hung": results.SKIPPED}


def test_a_piece_that_can_is_asked_to_write_what_it_has(runner: Runner) -> None:
    runner.run([Piece("tidy", ("tidy",), 6.0, 0.1, interrupt_s=5.0), piece("good")], [])
    tidy = runner.results["pieces"]["tidy"]
    assert (tidy["outcome"], tidy["problem"]) == (results.TIMED_OUT, "tidied up")


def test_logs_are_packed_without_folders(tmp_path: Path) -> None:
    folder = tmp_path / "scratch" / "daemons" / "a"
    folder.mkdir(parents=True)
    (folder / "daemon.log").write_bytes(b"x" * (2 << 20) + b"the end")
    pack_logs(tmp_path / "scratch", tmp_path / "logs.tar.gz")
    with tarfile.open(tmp_path / "logs.tar.gz") as archive:
        [entry] = archive.getmembers()
        kept = archive.extractfile(entry)
        assert kept is not None
        assert kept.read().endswith(b"xthe end")
    assert (entry.name, entry.size) == ("daemons-a-daemon.log", 1 << 20)


def test_the_last_words_of_a_silent_process(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("first\nValueError: last\n\n")
    assert last_words(log) == "ValueError: last"
    log.write_text("")
    assert last_words(log) == "it said nothing"


@pytest.mark.parametrize("prefix", ["", "[rank0]: "])
def test_the_last_words_are_what_was_raised(tmp_path: Path, prefix: str) -> None:
    """However much is logged after it."""
    log = tmp_path / "a.log"
    said = ["Traceback (most recent call last):", '  File "a.py"', "ValueError: why", "  more"]
    log.write_text("".join(f"{prefix}{line}\n" for line in said) + "WARNING: bye\n")
    assert last_words(log) == "ValueError: why"


def test_tests_are_counted() -> None:
    suite = '<testsuite tests="9" failures="1" errors="2" skipped="3"/>'
    found = junit_figures(f"<testsuites>{suite}</testsuites>")
    assert found["gpu_tests_passed"]["measured"] == 3
    assert found["gpu_tests_failed"]["measured"] == 3
    assert found["gpu_tests_failed"]["reached"] is False
    assert found["gpu_tests_skipped"]["measured"] == 3


def test_an_unknown_piece_ends_the_run_before_it_begins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main([str(tmp_path / "out"), "--scratch", str(tmp_path), "--only", "nothing"])
    assert code == 2
    assert "nothing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class TestMachine:
    def test_checkpoints_go_to_memory_where_there_is_enough_of_it(self, tmp_path: Path) -> None:
        gb = 10**9
        assert machine.scratch_parent(64 * gb, 130 * gb, tmp_path) == Path("/dev/shm")
        assert machine.scratch_parent(64 * gb, 100 * gb, tmp_path) == tmp_path
        assert machine.scratch_parent(64 << 20, 130 * gb, tmp_path) == tmp_path

    def test_memory_is_what_a_container_may_have_of_it(self) -> None:
        facts = replace(memory_facts(), available_bytes=10, limit_bytes=None)
        assert machine.usable_bytes(facts) == 10
        assert machine.usable_bytes(replace(facts, limit_bytes=7)) == 7
        assert machine.usable_bytes(replace(facts, limit_bytes=70)) == 10

    def test_a_copied_tree_can_be_told_its_commit(self, tmp_path: Path) -> None:
        assert machine.commit({}, tmp_path) is None
        (tmp_path / "COMMIT").write_text("fedcba\n")
        assert machine.commit({}, tmp_path) == "fedcba"
        assert machine.commit({machine.COMMIT_VARIABLE: "abc"}, tmp_path) == "abc"

    def test_the_processors_name_is_read(self) -> None:
        assert machine.cpu_model("processor\t: 0\nmodel name\t: A Good One\n") == "A Good One"


def test_processes_from_before_stay(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as earlier:
        runner = Runner(tmp_path / "out", tmp_path / "scratch", 100.0, dry_kind=None)
        with subprocess.Popen(["sleep", "60"]) as later:
            end_descendants(runner._others)
            assert not psutil.pid_exists(later.pid)
        assert earlier.poll() is None
        earlier.kill()
