"""The sweep of random boxes: what is drawn, and what counts as lost."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.sim_tables import sweep_table
from benchmarks.sweep import NUM_DRAWS, Loss, draw_panel, losses, rows_of, shown_losses, summary
from gpupoold.sim.scenario import build_scenario

DRAWS = range(0, NUM_DRAWS, 7)


def row(draw: int, policy: str, attainment: float | None) -> Any:
    return {"seed": draw, "policy": policy, "attainment": attainment}


ROWS = [
    *(row(1, "gpupool", 0.9), row(1, "request-level", 0.95), row(1, "aegaeon", 0.97)),
    *(row(2, "gpupool", 0.5), row(2, "request-level", 0.502), row(2, "aegaeon", None)),
    *(row(4, "gpupool", 0.5), row(4, "request-level", 0.51)),
]


@pytest.mark.parametrize("number", DRAWS)
def test_a_draw_is_the_same_again_and_can_be_simulated(number: int) -> None:
    panel = draw_panel(number)
    assert panel == draw_panel(number)
    scenario = build_scenario(panel.points()[0])
    assert 0 < len(scenario.requests) < 6000
    assert all(0 <= request.arrival_s < scenario.duration_s for request in scenario.requests)


def test_draws_differ_in_everything() -> None:
    panels = [draw_panel(number) for number in DRAWS]
    assert len({panel.title for panel in panels}) == len(panels)
    assert len({panel.box for panel in panels}) > 6
    assert len({panel.targets for panel in panels}) > 6


def test_a_loss_is_more_than_a_fifth_of_a_point_below_the_best() -> None:
    assert losses(ROWS) == [Loss(1, "aegaeon", 0.9, 0.97), Loss(4, "request-level", 0.5, 0.51)]
    lines = shown_losses(ROWS)
    assert [line.rpartition(" ")[2] for line in lines] == ["1", "4"]
    assert "97.0% of aegaeon" in lines[0]


def test_the_halves_are_counted_apart() -> None:
    tuned, judged = summary(ROWS)
    assert (tuned["draws"], tuned["num_draws"], tuned["num_losses"]) == ("tuned on", 1, 1)
    assert tuned["worst_points"] == pytest.approx(7.0)
    assert (judged["draws"], judged["num_draws"], judged["worst_draw"]) == ("judged on", 2, 4)
    assert judged["attainment"]["gpupool"] == pytest.approx(0.5)
    assert judged["attainment"]["aegaeon"] == pytest.approx(0.5), "the default's where it has none"


def test_a_draw_is_run_with_every_policy() -> None:
    [quickest] = [number for number in (2,) if draw_panel(number).box.num_devices == 1]
    rows = rows_of(quickest)
    assert [one["policy"] for one in rows] == list(draw_panel(quickest).policies)
    table = sweep_table({"sweep": summary(rows)})
    assert "| judged on | 1 |" in table
