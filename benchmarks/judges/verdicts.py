"""Outcomes of a judge's tests with both servers, and what follows from them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a test ended with one server."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    MISSING = "not run"


_RANDOM = re.compile(r"[0-9a-f]{8,}(-[0-9a-f]{4,})*")


class Verdict(StrEnum):
    """A comparison of two outcomes."""

    SAME = "same"
    KNOWN = "known"
    """The outcomes differ, for a reason that is listed."""
    DIFFERS = "differs"


@dataclass(frozen=True, slots=True)
class Result:
    """How a test ended with one server, and the first line of what went wrong."""

    outcome: Outcome
    text: str = ""


def result(outcome: Outcome, text: str = "") -> Result:
    """Return a result without the random ids in its text, so that reports can be compared."""
    return Result(outcome, _RANDOM.sub("*", text))


@dataclass(frozen=True, slots=True)
class Row:
    """A test with both servers; ``reason`` is that of a known difference."""

    judge: str
    test: str
    gpupool: Result
    vllm: Result
    verdict: Verdict
    reason: str = ""


Results = Mapping[str, Result]  # by test
Known = Mapping[str, Mapping[str, str]]  # reasons by patterns of tests, by judge

_ABSENT = Result(Outcome.MISSING)


def compare(judge: str, gpupool: Results, vllm: Results, known: Known) -> list[Row]:
    """Return a row for each test of either server, in the order of their names.

    A difference is known if the whole name of its test matches a pattern of the judge.
    """
    patterns = known.get(judge, {})
    rows = []
    for test in sorted({*gpupool, *vllm}):
        ours, theirs = gpupool.get(test, _ABSENT), vllm.get(test, _ABSENT)
        if ours.outcome is theirs.outcome:
            rows.append(Row(judge, test, ours, theirs, Verdict.SAME))
            continue
        reason = next((why for one, why in patterns.items() if re.fullmatch(one, test)), "")
        verdict = Verdict.KNOWN if reason else Verdict.DIFFERS
        rows.append(Row(judge, test, ours, theirs, verdict, reason))
    return rows


def compared_again(rows: Iterable[Row], known: Known) -> list[Row]:
    """Return rows with the verdicts of the present reasons."""
    found = list(rows)
    again = []
    for judge in dict.fromkeys(row.judge for row in found):
        mine = [row for row in found if row.judge == judge]
        gpupool = {row.test: row.gpupool for row in mine}
        again += compare(judge, gpupool, {row.test: row.vllm for row in mine}, known)
    return again


def differences(rows: Iterable[Row]) -> list[Row]:
    """Return the rows whose outcomes differ."""
    return [row for row in rows if row.verdict is not Verdict.SAME]


def is_accepted(rows: Iterable[Row]) -> bool:
    """Return whether every difference is known."""
    return all(row.verdict is not Verdict.DIFFERS for row in rows)


def lines(rows: Iterable[Row]) -> Iterator[str]:
    """Yield a table of all rows as text."""
    rows = list(rows)
    width = max((len(row.test) for row in rows), default=4)
    yield f"{'judge':<12} {'test':<{width}} {'gpupool':<8} {'vllm':<8} verdict"
    for row in rows:
        verdict = f"{row.verdict}: {row.reason}" if row.reason else row.verdict
        outcomes = f"{row.gpupool.outcome:<8} {row.vllm.outcome:<8}"
        yield f"{row.judge:<12} {row.test:<{width}} {outcomes} {verdict}"
