"""docs/internals/judge.md is what the results say, and every difference in it has a reason."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.judge import JUDGES, PAGE, RESULTS, replaced
from benchmarks.judges.known import KNOWN
from benchmarks.judges.page import Report, page_text, read_report, write_report
from benchmarks.judges.verdicts import Outcome, Result, Row, Verdict, compare, is_accepted

PASSED, FAILED = Result(Outcome.PASSED), Result(Outcome.FAILED, "400")


def test_the_page_is_generated_from_the_results() -> None:
    assert PAGE.read_text() == page_text(read_report(RESULTS))


def test_every_difference_has_a_reason() -> None:
    rows = read_report(RESULTS).rows
    assert {row.judge for row in rows} <= set(JUDGES)
    assert is_accepted(rows)
    assert any(row.verdict is Verdict.SAME and row.gpupool == PASSED for row in rows)


def test_known_differences_are_patterns_with_reasons() -> None:
    assert set(KNOWN) == set(JUDGES)
    for patterns in KNOWN.values():
        for pattern, reason in patterns.items():
            re.compile(pattern)
            assert reason


def test_a_run_replaces_the_rows_of_its_judges_only(tmp_path: Path) -> None:
    old = Report([*compare("a", {"x": PASSED}, {"x": PASSED}, {}), *_differing("b", "y")])
    path = tmp_path / "results" / "judge.json"
    write_report(path, replaced(old, _differing("a", "z")))
    kept = read_report(path)
    assert [(row.judge, row.test) for row in kept.rows] == [("a", "z"), ("b", "y")]
    assert read_report(tmp_path / "none.json").rows == []


def test_the_page_counts_outcomes_and_differences() -> None:
    both = {"p": PASSED, "f": FAILED, "dx": PASSED}
    rows = compare("a", both, both | {"dx": FAILED}, {"a": {"d.*": "the reason"}})
    page = page_text(Report(rows))
    assert "| a | 3 | 1 | 1 | 0 | 1 |" in page
    assert "| a | 1 | passed | failed | the reason |" in page
    assert "**none**" in page_text(Report(_differing("a", "x")))
    assert "There are none." in page_text(Report([]))


def _differing(judge: str, test: str) -> list[Row]:
    return compare(judge, {test: PASSED}, {test: FAILED}, {})
