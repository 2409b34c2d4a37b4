"""The report of vLLM's own tests, as results of a judge."""

from __future__ import annotations

from benchmarks.judges.engine_tests import read_report
from benchmarks.judges.verdicts import Outcome, Result

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" tests="5">
<testcase classname="a" name="test_passes" file="tests/a.py" line="1" time="0.1" />
<testcase classname="a" name="test_fails[x]" file="tests/a.py">
<failure message="AssertionError: cmpl-0123456789abcdef of b5e6f7a8-0123-4567-89ab-cdef01234567
second line">trace</failure></testcase>
<testcase classname="a" name="test_skipped" file="tests/a.py">
<skipped type="pytest.skip" message="needs a GPU">here</skipped></testcase>
<testcase classname="a" name="test_left_behind" file="tests/a.py" />
<testcase classname="a" name="test_left_behind" file="tests/a.py">
<error message="teardown failed">trace</error></testcase>
</testsuite></testsuites>
"""


def test_results_are_those_of_the_report_without_random_ids() -> None:
    # An XML reader makes a space of the line break in an attribute.
    assert read_report(REPORT) == {
        "tests/a.py::test_passes": Result(Outcome.PASSED),
        "tests/a.py::test_fails[x]": Result(
            Outcome.FAILED, "AssertionError: cmpl-* of * second line"
        ),
        "tests/a.py::test_skipped": Result(Outcome.SKIPPED, "needs a GPU"),
        "tests/a.py::test_left_behind": Result(Outcome.FAILED, "teardown failed"),
    }
