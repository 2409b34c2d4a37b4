"""Runs the tests and benchmarks that need a GPU, within a given time, and stores the results.

Each piece is a separate process, so a crash or hang of a piece does not affect other pieces. The
results are rewritten after every piece. See ``benchmarks/gpu/run.sh``.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil

from benchmarks.gpu import figures, machine, results
from benchmarks.gpu.pieces import (
    KEPT_S,
    TESTS,
    Piece,
    add_dry_run,
    allotted_s,
    chosen,
    group_size,
    why_too_few,
)
from benchmarks.gpu.turns import Turns
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.system.process import die_with_parent

_PR_SET_CHILD_SUBREAPER = 36
_TERMINATE_S = 3.0
# A piece is given less time by this, so that the piece ends by itself.
_GRACE_S = 4.0
_LOG_BYTES = 1 << 20
_PROBLEM_BYTES = 64 << 10
# torch's processes print their rank before error messages.
_RANK = re.compile(r"^\[rank\d+\]: ?")


class Runner:
    """One run. ``out`` gets ``results.json``, ``junit.xml`` and ``logs.tar.gz``."""

    def __init__(self, out: Path, scratch: Path, budget_s: float, *, dry_kind: str | None) -> None:
        self._out = out
        self._scratch = scratch
        self._dry_kind = dry_kind
        self._budget_s = budget_s
        self._started_s = time.monotonic()
        self._others = set(psutil.Process().children(recursive=True))
        self._lock = threading.Lock()  # of the results, where pieces run together
        self.results: dict[str, Any] = {}

    def run(
        self, pieces: Sequence[Piece], skipped: Sequence[str], *, fails_fast: bool = False
    ) -> None:
        """All pieces in turn, as long as there is time; if it ``fails_fast``, until one fails."""
        self._begin(skipped)
        num_gpus = machine.num_gpus()
        for piece in pieces:
            size = self._size(piece)
            if fails_fast and results.has_failed(self.results):
                self._note(piece.name, results.SKIPPED, problem="an earlier piece has failed")
                continue
            if not size:
                self._note(piece.name, results.SKIPPED, problem=why_too_few(piece, num_gpus))
                continue
            left_s = self._budget_s - (time.monotonic() - self._started_s)
            seconds = allotted_s(piece, left_s, is_last=piece is pieces[-1])
            if seconds is None:
                self._note(piece.name, results.NO_TIME)
                continue
            self._run_piece(piece, seconds, size)
            end_descendants(self._others)
        self._finish()

    def _size(self, piece: Piece) -> int:
        """GPUs of each of the piece's groups; 0 if the machine has too few."""
        return group_size(piece, machine.num_gpus(), is_emulated=self._dry_kind == "emulated")

    def _begin(self, skipped: Sequence[str]) -> None:
        for folder in (self._out, self._scratch / "logs", self._scratch / "reports"):
            folder.mkdir(parents=True, exist_ok=True)
        self.results = results.begin(self._facts(), is_dry=self._dry_kind is not None)
        for name in skipped:
            self._note(name, results.NOT_ASKED_FOR)

    def _finish(self) -> None:
        self.results["wall_s"] = time.monotonic() - self._started_s
        self._write()
        pack_logs(self._scratch, self._out / "logs.tar.gz")

    def run_together(self, pieces: Sequence[Piece], skipped: Sequence[str]) -> None:
        """All pieces at the same time; they measure in turn, in this order."""
        self._begin(skipped)
        names = tuple(piece.name for piece in pieces)
        turns = Turns(self._scratch / "turns", names)
        os.environ |= turns.environment_of()
        seconds = self._budget_s - (time.monotonic() - self._started_s) - KEPT_S

        def run(piece: Piece) -> None:
            try:
                self._run_piece(piece, seconds, self._size(piece))
            finally:
                turns.end(piece.name)

        with ThreadPoolExecutor(len(pieces)) as threads:
            for ended in [threads.submit(run, piece) for piece in pieces]:
                ended.result()
        end_descendants(self._others)
        self._finish()

    def _run_piece(self, piece: Piece, seconds: float, num_gpus: int) -> None:
        print(f"{piece.name}: at most {seconds:.0f} s", flush=True)
        log_path = self._scratch / "logs" / f"{piece.name}.log"
        report_path = self._scratch / "reports" / f"{piece.name}.json"
        started_s = time.monotonic()
        with log_path.open("wb") as log:
            process = subprocess.Popen(
                self._command(piece, report_path, seconds, num_gpus),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=machine.ROOT,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),
            )
            outcome = _wait(process, seconds, piece.interrupt_s)
        took_s = time.monotonic() - started_s
        if piece is TESTS:
            report = _test_report(self._out / "junit.xml")
        else:
            report = _read_report(report_path)
        problem = "" if outcome == results.DONE else last_words(log_path)
        self._note(
            piece.name, outcome, seconds=took_s, limit_s=seconds, problem=problem, report=report
        )
        print(f"{piece.name}: {outcome} after {took_s:.0f} s {problem}".rstrip(), flush=True)

    def _command(self, piece: Piece, report_path: Path, seconds: float, num_gpus: int) -> list[str]:
        command = [sys.executable, "-m", *piece.arguments]
        if piece is TESTS:
            return [*command, f"--junitxml={self._out.resolve() / 'junit.xml'}"]
        command += ["--name", piece.name, "--out", str(report_path)]
        command += ["--scratch", str(self._scratch), "--limit", str(seconds - _GRACE_S)]
        if piece.num_groups:
            command += ["--gpus", str(num_gpus)]
        return [*command, "--dry-run", self._dry_kind] if self._dry_kind else command

    def _facts(self) -> dict[str, Any]:
        return {
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "budget_s": self._budget_s,
            "commit": machine.commit(os.environ),
            "hardware": machine.hardware(),
            "versions": machine.versions(),
            "scratch": str(self._scratch.parent),
        }

    def _note(self, name: str, outcome: str, **facts: Any) -> None:
        with self._lock:
            self.results = results.with_piece(self.results, name, outcome, **facts)
            self._write()

    def _write(self) -> None:
        results.write(self._out / "results.json", self.results)


def end_descendants(others: Set[psutil.Process]) -> None:
    """End whatever a piece has left behind: orphans are this process's children.

    The ``others`` were there before the pieces.
    """
    left = [one for one in psutil.Process().children(recursive=True) if one not in others]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(left, timeout=_TERMINATE_S)


def attach_orphans() -> None:
    """Become the parent of all descendants whose own parents end."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def last_words(log_path: Path) -> str:
    """What a process raised last, which others may have talked after; else its last line."""
    with log_path.open("rb") as log:
        log.seek(max(0, log_path.stat().st_size - _PROBLEM_BYTES))
        lines = log.read().decode("utf-8", "replace").strip().splitlines()
    raised, is_inside = "", False
    for line in (_RANK.sub("", line) for line in lines):
        if line.startswith("Traceback (most recent call last)"):
            is_inside = True
        elif is_inside and line and not line[0].isspace():
            raised, is_inside = line, False
    return (raised or lines[-1])[:300] if lines else "it said nothing"


def pack_logs(scratch: Path, target: Path) -> None:
    """The ends of all logs in one archive, under names without folders."""
    with tarfile.open(target, "w:gz") as archive:
        for path in sorted(scratch.rglob("*.log")):
            with path.open("rb") as log:
                log.seek(max(0, path.stat().st_size - _LOG_BYTES))
                data = log.read(_LOG_BYTES)
            entry = tarfile.TarInfo("-".join(path.relative_to(scratch).parts))
            entry.size = len(data)
            archive.addfile(entry, BytesIO(data))


def junit_figures(junit: str) -> dict[str, figures.Figure]:
    """How many tests passed, failed and were skipped, of the text of a junit file."""
    suites = list(ElementTree.fromstring(junit).iter("testsuite"))
    counts = {
        name: sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    return {
        "gpu_tests_passed": figures.measured(passed),
        "gpu_tests_failed": figures.at_most(failed, 0),
        "gpu_tests_skipped": figures.measured(counts["skipped"]),
    }


def _wait(process: subprocess.Popen[bytes], seconds: float, interrupt_s: float) -> str:
    """How it ended; when its time is over, it is asked to end, and then made to."""
    try:
        return results.DONE if process.wait(seconds - interrupt_s) == 0 else results.FAILED
    except subprocess.TimeoutExpired:
        pass
    if interrupt_s:
        process.send_signal(signal.SIGINT)  # not to the group: the piece ends its children
    for wait_s, next_signal in ((interrupt_s, signal.SIGTERM), (_TERMINATE_S, signal.SIGKILL)):
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, next_signal)
    process.wait()
    return results.TIMED_OUT


def _test_report(path: Path) -> Mapping[str, Any]:
    try:
        return {"figures": junit_figures(path.read_text("utf-8"))}
    except (OSError, ElementTree.ParseError):
        return {}


def _read_report(path: Path) -> Mapping[str, Any]:
    try:
        report: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return report


def main(argv: Sequence[str] | None = None) -> int:
    """Command line; exit code 1 when a piece failed, 2 when there is no such piece."""
    args = _parse(argv)
    try:
        pieces = chosen(args.only.split(",") if args.only else [], is_dry=bool(args.dry_run))
    except UsageError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    wanted = [piece for piece in pieces if piece is not TESTS or not args.no_tests]
    names = {piece.name for piece in wanted}
    skipped = [piece.name for piece in chosen([], is_dry=False) if piece.name not in names]
    attach_orphans()
    runner = Runner(args.out, args.scratch, args.budget, dry_kind=args.dry_run)
    if args.together:
        runner.run_together(wanted, skipped)
    else:
        runner.run(wanted, skipped, fails_fast=args.fail_fast)
    for line in results.table(runner.results):
        print(line)
    return 1 if results.has_failed(runner.results) else 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="run.sh", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for the results")
    parser.add_argument("--scratch", type=Path, required=True, help=argparse.SUPPRESS)
    add_dry_run(parser)
    parser.add_argument("--only", default="", metavar="A,B", help="these pieces, in this order")
    parser.add_argument("--no-tests", action="store_true", help="benchmarks only")
    parser.add_argument(
        "--together", action="store_true", help="start all pieces at once; they measure in turn"
    )
    parser.add_argument("--fail-fast", action="store_true", help="none after a piece that failed")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds (default: 480)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except GpupoolError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
