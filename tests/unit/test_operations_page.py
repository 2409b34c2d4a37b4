"""docs/operations.md names what the code has."""

from __future__ import annotations

import re

from gpupool_state.history import MINUTES
from gpupoold.durations import Lateness, RequestStages
from gpupoold.scheduling.wait_estimate import Standing
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
ROWS = set(re.findall(r"^\| `([a-z-]+)` \|", PAGE, flags=re.MULTILINE))


def test_every_standing_is_explained() -> None:
    assert {*Standing, "loading"} <= ROWS


def test_every_cause_of_lateness_is_explained() -> None:
    causes = Lateness().by_name().keys()
    assert causes <= ROWS
    counted = {name for name in MINUTES.columns if name.startswith("late_by_")}
    assert counted == {f"late_by_{cause}_s" for cause in causes}


def test_every_stage_of_a_request_is_explained() -> None:
    stages = RequestStages().by_name().keys()
    assert stages <= ROWS
    for phase in ("first_token", "between_tokens"):
        stored = {name for name in MINUTES.columns if name.startswith(f"{phase}_")}
        assert stored == {f"{phase}_{stage}_s" for stage in stages}
