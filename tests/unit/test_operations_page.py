"""docs/operations.md names what the code has."""

from __future__ import annotations

import re
from dataclasses import fields

from gpupoold.api.schemas_explain import LatenessInfo
from gpupoold.control.accounting.model_stats import Counts
from gpupoold.scheduling.explain import Standing
from gpupoold.scheduling.rules import Rule
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| `([a-z-]+)` \| ([^|]+) \|", PAGE, flags=re.MULTILINE))


def test_every_rule_is_explained_as_the_code_says_it() -> None:
    # A name in brackets behind it is the policy that has the rule.
    assert {rule.value: rule.why for rule in Rule} == {
        rule.value: re.sub(r" \(`.*", "", ROWS[rule.value]) for rule in Rule
    }


def test_every_standing_is_explained() -> None:
    assert {*Standing, "loading"} <= ROWS.keys()


def test_every_cause_of_lateness_is_explained() -> None:
    causes = {name.removesuffix("_s") for name in LatenessInfo.model_fields}
    assert causes <= ROWS.keys()
    counted = {one.name for one in fields(Counts) if one.name.startswith("late_by_")}
    assert counted == {f"late_by_{cause}_s" for cause in causes}
