"""TokenScale's burst: one device prefills, one decodes and may prefill in chunks beside it."""

from __future__ import annotations

import pytest

from gpupoold.sim.run import RunRow, run_points
from tests.sim.points import preset_points


@pytest.fixture(scope="module")
def rows() -> dict[str, RunRow]:
    points = preset_points("tokenscale-burst")
    return {row["preset"].removeprefix("tokenscale-burst-"): row for row in run_points(points)}


def share(value: float | None) -> float:
    assert value is not None
    return value


def test_all_is_served_in_the_end(rows: dict[str, RunRow]) -> None:
    assert [row["finished"] == row["requests"] for row in rows.values()] == [True] * 3


def test_a_convertible_decoder_takes_the_burst(rows: dict[str, RunRow]) -> None:
    converting, fixed = rows["converting"], rows["fixed"]
    assert share(converting["ttft_attainment"]) > 0.99
    assert share(fixed["ttft_attainment"]) < 0.9
    assert share(converting["attainment"]) > share(fixed["attainment"]) + 0.1
    assert share(converting["burst_ttft_p99_s"]) < 2.0 < share(fixed["burst_ttft_p99_s"])


def test_answers_keep_their_pace_beside_the_prompts(rows: dict[str, RunRow]) -> None:
    """What is late is the first step after a hand-over, which waits for a step under way."""
    assert share(rows["converting"]["tbt_attainment"]) > 0.98


def test_devices_that_do_both_are_behind_in_first_tokens(rows: dict[str, RunRow]) -> None:
    assert share(rows["mixed"]["attainment"]) > 0.9
    assert share(rows["mixed"]["ttft_attainment"]) < share(rows["converting"]["ttft_attainment"])
