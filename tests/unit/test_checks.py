"""Every closed-form check C1 to C21 from the papers but C19 has a test that is named after it.

C19 is the margin for errors of predicted lengths (Aladdin, appendix G), which no policy has.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = [number for number in range(1, 22) if number != 19]
# Not by `ast`: its parser fails in Python 3.11 if another thread of the tests parses too.
_TEST = re.compile(r"^ *def (test_c(\d+)_\w*)", re.MULTILINE)


@cache
def functions_by_check() -> dict[int, list[str]]:
    """Names of test functions ``test_c<N>_...`` with their files, by N."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for name, number in _TEST.findall(path.read_text("utf-8")):
            found[int(number)].append(f"{path.relative_to(TESTS)}::{name}")
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_the_check_has_a_test(check: int) -> None:
    assert functions_by_check()[check], f"no test is named test_c{check}_..."


def test_no_test_is_named_after_an_unknown_check() -> None:
    assert set(functions_by_check()) <= set(CHECKS)
