"""One model with more prompts than its device can serve: which first tokens are on time."""

from __future__ import annotations

import pytest

from gpupoold.sim.run import run_points
from gpupoold.sim.scenario import Overrides
from tests.sim.points import preset_points

ASKED = {5.0: 0.98, 6.0: 0.9, 7.0: 0.75, 8.0: 0.65}


@pytest.mark.parametrize("seed", range(3))
def test_overload_by_prompts_keeps_most_first_tokens_on_time(seed: int) -> None:
    points = preset_points("prism-overload", Overrides(policies=("gpupool",), seed=seed))
    rows = list(run_points(points))
    assert [row["rps"] for row in rows] == list(ASKED)
    for row in rows:
        assert row["finished"] == row["requests"]
        assert (row["ttft_attainment"] or 0.0) >= ASKED[row["rps"] or 0.0]
        assert (row["attainment"] or 0.0) >= ASKED[row["rps"] or 0.0]
