"""What follows from the outcomes of a judge's tests with both servers."""

from __future__ import annotations

import pytest

from benchmarks.judges.comply import read_result
from benchmarks.judges.verdicts import (
    Outcome,
    Result,
    Verdict,
    compare,
    compared_again,
    differences,
    is_accepted,
    lines,
)

PASSED, FAILED = Result(Outcome.PASSED), Result(Outcome.FAILED, "400")


@pytest.mark.parametrize("outcome", [PASSED, FAILED, Result(Outcome.SKIPPED)])
def test_equal_outcomes_are_the_same(outcome: Result) -> None:
    other = Result(outcome.outcome, "another text")
    [row] = compare("judge", {"a": outcome}, {"a": other}, {})
    assert row.verdict is Verdict.SAME
    assert is_accepted([row])
    assert differences([row]) == []


@pytest.mark.parametrize(("gpupool", "vllm"), [(PASSED, FAILED), (FAILED, PASSED)])
def test_a_difference_needs_a_reason(gpupool: Result, vllm: Result) -> None:
    [row] = compare("judge", {"a[x]": gpupool}, {"a[x]": vllm}, {"other": {".*": "why"}})
    assert row.verdict is Verdict.DIFFERS
    assert not is_accepted([row])
    [row] = compare("judge", {"a[x]": gpupool}, {"a[x]": vllm}, {"judge": {r"a\[.*": "why"}})
    assert (row.verdict, row.reason) == (Verdict.KNOWN, "why")
    assert is_accepted([row])
    assert differences([row]) == [row]


def test_a_reason_covers_whole_names_only() -> None:
    [row] = compare("judge", {"ab": PASSED}, {"ab": FAILED}, {"judge": {"a": "why"}})
    assert row.verdict is Verdict.DIFFERS


def test_a_test_of_one_server_only_differs() -> None:
    rows = compare("judge", {"a": PASSED}, {"b": PASSED}, {})
    assert [row.verdict for row in rows] == [Verdict.DIFFERS, Verdict.DIFFERS]
    assert rows[0].vllm.outcome is Outcome.MISSING


def test_a_failure_on_both_sides_is_no_difference_even_with_a_reason() -> None:
    [row] = compare("judge", {"a": FAILED}, {"a": FAILED}, {"judge": {"a": "why"}})
    assert (row.verdict, row.reason) == (Verdict.SAME, "")


def test_new_reasons_change_verdicts_of_old_rows() -> None:
    rows = compare("judge", {"a": PASSED}, {"a": FAILED}, {})
    assert is_accepted(compared_again(rows, {"judge": {"a": "why"}}))
    assert compared_again(rows, {}) == rows


def test_the_table_has_a_line_for_each_row() -> None:
    rows = compare("judge", {"a": PASSED, "b": PASSED}, {"a": FAILED, "b": PASSED}, {})
    [_, first, second] = lines(rows)
    assert first.split() == ["judge", "a", "passed", "failed", "differs"]
    assert second.split() == ["judge", "b", "passed", "passed", "same"]


def test_rows_of_llm_comply_are_read() -> None:
    assert read_result({"status": "passed", "warnings": ["w"]}) == Result(Outcome.PASSED, "w")
    failed = read_result({"status": "failed", "errors": ["one", "two"]})
    assert failed == Result(Outcome.FAILED, "one; two")
