"""Rows: what they have, that they repeat, refusals, goodput, active models."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from gpupoold.errors import UsageError
from gpupoold.sim import run
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.metrics import Goodput
from gpupoold.sim.presets import poisson_panel
from gpupoold.sim.run import RunRow, mean_active_models, run_point, run_points, sweep_goodput
from gpupoold.sim.scenario import Overrides, Point, build_scenario
from gpupoold.sim.workloads import SimRequest
from tests.sim.closed_forms import expected_active_models
from tests.sim.points import preset_points

SMALL = Overrides(
    policies=("request-level",), models=(2, 4), box=parse_box("2xH800"), duration_s=30.0
)


def small_points(wanted: Overrides = SMALL) -> list[Point]:
    return poisson_panel().changed(wanted).points()


def without_wall(row: RunRow) -> dict[str, object]:
    return {key: value for key, value in row.items() if key != "wall_s"}


def test_a_row_is_json_and_says_what_was_asked() -> None:
    row = run_point(small_points()[1])
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    asked = [row[key] for key in ("preset", "policy", "devices", "models", "rps", "seed")]
    assert asked == ["poisson", "request-level", "2xH800", 4, 0.1, 0]
    assert row["finished"] == row["requests"] > 0
    assert row["attainment"] == 1.0


def test_few_models_on_a_big_box_are_always_in_time() -> None:
    wanted = replace(SMALL, policies=("gpupool",), models=(4,), box=parse_box("4xH800"))
    row = run_point(small_points(wanted)[0])
    assert row["attainment"] == 1.0
    assert row["ttft_p99_s"] is not None
    assert math.isfinite(row["ttft_p99_s"])


def test_processes_change_nothing() -> None:
    points = small_points()
    alone = [without_wall(row) for row in run_points(points)]
    together = [without_wall(row) for row in run_points(points, jobs=2)]
    assert alone == together
    with pytest.raises(UsageError, match="at least one"):
        next(run_points(points, jobs=0))


def test_an_error_in_a_process_comes_out() -> None:
    wanted = replace(SMALL, box=parse_box("1xA10"))
    with pytest.raises(UsageError, match="weighs"):
        list(run_points(small_points(wanted), jobs=2))


def test_progress_is_reported_in_virtual_time() -> None:
    reported: list[tuple[int, float, float]] = []
    wanted = replace(SMALL, models=(8,), rps=(1.0,), duration_s=60.0)
    points = small_points(wanted)
    list(run_points(points, on_progress=lambda *args: reported.append(args)))
    assert reported == sorted(reported)
    assert {(index, duration_s) for index, _, duration_s in reported} <= {(0, 60.0)}


def test_overload_counts_what_never_came_as_missed() -> None:
    wanted = replace(SMALL, models=(20,), rps=(2.0,), box=parse_box("1xH800"), duration_s=5.0)
    [point] = small_points(wanted)
    scenario = build_scenario(point)
    last_s = max(10 + one.arrival_s + 0.1 * (one.output_tokens - 1) for one in scenario.requests)
    assert scenario.end_s >= last_s
    row = run_point(point)
    assert row["attainment"] is not None
    assert row["attainment"] < 0.9


def test_no_request_at_all_has_no_attainment() -> None:
    wanted = replace(SMALL, models=(1,), rps=(1e-6,), duration_s=1.0)
    row = run_point(small_points(wanted)[0])
    assert (row["requests"], row["attainment"], row["ttft_p50_s"]) == (0, None, None)


def test_prefetch_is_switched_off_for_those_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Stop(Exception):
        pass

    def refuse(models: object, policy: object, devices: list[BoxDevice], **options: object) -> None:
        asked.append(devices[0].prefetches)
        raise Stop

    monkeypatch.setattr(run, "Simulation", refuse)
    wanted = Overrides(policies=("aegaeon", "gpupool"), models=(2,), duration_s=5.0)
    for point in preset_points("aegaeon-fig17-a10", wanted):
        with pytest.raises(Stop):
            run_point(point)
    assert asked == [False, True]


def test_a_refusal_is_a_row_where_multiplexing_may_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> RunRow:
        raise UsageError("too many models")

    points = small_points()
    monkeypatch.setattr(run, "_run", refuse)
    with pytest.raises(UsageError, match="too many"):
        list(run_points(points))
    rows = list(run_points([replace(point, policy="static") for point in points]))
    assert [row["refused"] for row in rows] == ["too many models"] * 2
    assert [row["attainment"] for row in rows] == [None, None]


def test_goodput_by_preset_and_policy() -> None:
    model = run_point(small_points()[0])

    def row(policy: str, models: int, attainment: float | None) -> RunRow:
        changed = model.copy()
        changed.update({"policy": policy, "models": models, "attainment": attainment})
        return changed

    rows = [
        *(row("falls", 40, 1.0), row("falls", 60, 0.8)),
        *(row("holds", 40, 1.0), row("holds", 60, 0.95)),
        *(row("never", 40, 0.5), row("never", 60, 0.2)),
        *(row("static", 40, 1.0), row("static", 60, None)),
        *(row("refused", 40, None), row("refused", 60, None)),
        row("single", 40, 1.0),
    ]
    assert sweep_goodput(rows) == {
        ("poisson", "falls"): Goodput(50.0, is_lower_bound=False),
        ("poisson", "holds"): Goodput(60, is_lower_bound=True),
        ("poisson", "never"): None,
        ("poisson", "static"): Goodput(40, is_lower_bound=False),
        ("poisson", "refused"): None,
    }


class TestActiveModels:
    def test_by_hand(self) -> None:
        at = (("a", 0.0), ("a", 5.0), ("a", 30.0), ("b", 12.0))
        requests = [SimRequest(f"r{n}", model, s, 1, 1) for n, (model, s) in enumerate(at)]
        # From 10 s to 40 s: a until 15 s and from 30 s to 40 s, b from 12 s to 22 s.
        assert mean_active_models(requests, 10.0, 40.0) == pytest.approx((5 + 10 + 10) / 30)

    def test_figure_4(self) -> None:
        [point] = preset_points("aegaeon-fig4")
        scenario = build_scenario(point)
        active = mean_active_models(scenario.requests, 16.79, scenario.duration_s)
        assert active == pytest.approx(46.55, abs=1.0)
        assert active == pytest.approx(expected_active_models(100, 0.037, 16.79), abs=1.0)


def test_shares_of_the_devices_time_are_shares_in_overload_too() -> None:
    wanted = replace(SMALL, policies=("gpupool",), models=(8,), rps=(2.0,), duration_s=20.0)
    row = run_point(small_points(replace(wanted, box=parse_box("1xH800")))[0])
    assert 0.9 < row["busy_share"] + row["switching_share"] <= 1.0
    assert row["switching_share"] > 0


def test_static_loads_its_models_once_and_never_switches() -> None:
    wanted = replace(SMALL, policies=("static",), models=(6,), rps=(0.5,))
    row = run_point(small_points(wanted)[0])
    assert row["switches"] == 0 < row["switching_share"]
