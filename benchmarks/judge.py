"""Outside judges of the HTTP API, with gpupool and with ``vllm serve``: ``make judge``.

    python -m benchmarks.judge [--only JUDGE ...] [--page-only]

Both servers have the same tiny checkpoint on an emulated device, so that only differences count.
Prints a table of all tests, writes ``build/judge.json``, and replaces the judges' rows in
``benchmarks/results/judge/judge.json`` and ``docs/internals/judge.md``. Exit code 1 if there is a
difference without a reason in ``judges/known.py``. A judge that the package index does not have is
left out, with the reason.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.judges import comply, engine_tests
from benchmarks.judges.arguments import read_arguments
from benchmarks.judges.known import KNOWN
from benchmarks.judges.page import Report, page_text, read_report, write_report
from benchmarks.judges.selection import FILES, MODELS, TRAINED
from benchmarks.judges.servers import running
from benchmarks.judges.verdicts import Results, Row, compare, compared_again, is_accepted, lines
from gpupoold.errors import Failed
from scripts.cached_checkpoints import checkpoints_of, trained_checkpoint

_ROOT = Path(__file__).resolve().parent.parent
BUILD = _ROOT / "build"
RESULTS = _ROOT / "benchmarks" / "results" / "judge" / "judge.json"
PAGE = _ROOT / "docs" / "internals" / "judge.md"
TARGETS = ("gpupool", "vllm")
_WORDS = ["--max-model-len", "8192", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]

Judge = Callable[[str, Path, Path], Results]
"""Judges a target, with a folder for its files and the checkpoint."""


def judge_comply(target: str, folder: Path, checkpoint: Path) -> Results:
    """Run ``llm-comply`` against a target."""
    program = comply.install(BUILD / "judges" / "llm-comply")
    with (
        running(target, folder) as server,
        server.serving(checkpoint, [TRAINED], read_arguments(_WORDS)) as url,
    ):
        return comply.judge(program, url, TRAINED)


def judge_engine_tests(target: str, folder: Path, checkpoint: Path) -> Results:
    """Run vLLM's own tests against a target."""
    source = engine_tests.fetch(BUILD / "judges")
    stand_ins = {**checkpoints_of("tests.support.tiny_pooling"), TRAINED: checkpoint}
    models = {name: stand_ins[kind] for name, kind in MODELS.items()}
    return engine_tests.judge(target, source, FILES, models, folder)


JUDGES: Mapping[str, Judge] = {"llm-comply": judge_comply, "vllm-tests": judge_engine_tests}


def judged(names: Sequence[str], checkpoint: Path) -> Report:
    """Run judges against both targets."""
    rows: list[Row] = []
    absent: dict[str, str] = {}
    for name in names:
        found = {}
        try:
            for target in TARGETS:
                print(f"{name}: {target}", flush=True)
                folder = BUILD / "judges" / "runs" / name / target
                found[target] = JUDGES[name](target, folder, checkpoint)
        except Failed as error:
            absent[name] = str(error)
            continue
        rows += compare(name, found["gpupool"], found["vllm"], KNOWN)
    return Report(rows, absent)


def replaced(kept: Report, rows: Sequence[Row]) -> Report:
    """Return a report with these rows in the place of all rows of their judges."""
    judged_now = {row.judge for row in rows}
    return Report([*(row for row in kept.rows if row.judge not in judged_now), *rows])


def main(argv: Sequence[str] | None = None) -> int:
    """Run the judges; exit code 1 if a difference has no reason."""
    parser = argparse.ArgumentParser(prog="benchmarks.judge")
    parser.add_argument("--only", nargs="+", choices=JUDGES, default=list(JUDGES))
    parser.add_argument("--page-only", action="store_true", help="generate the page again")
    arguments = parser.parse_args(argv)
    if arguments.page_only:
        report = Report(compared_again(read_report(RESULTS).rows, KNOWN))
        write_report(RESULTS, report)
    else:
        report = judged(arguments.only, trained_checkpoint())
        write_report(BUILD / "judge.json", report)
        write_report(RESULTS, replaced(read_report(RESULTS), report.rows))
    PAGE.write_text(page_text(read_report(RESULTS)))
    print(*lines(report.rows), sep="\n")
    for name, reason in report.absent.items():
        print(f"{name}: left out: {reason}")
    return 0 if is_accepted(report.rows) else 1


if __name__ == "__main__":
    sys.exit(main())
