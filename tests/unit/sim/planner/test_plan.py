"""Plans: the same numbers as the simulator's, the least number of devices, tried advice only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.domain import Targets
from gpupoold.errors import UsageError
from gpupoold.sim.boxes import box_models, parse_box
from gpupoold.sim.host import HostWishes
from gpupoold.sim.planner.load import poisson_load, recorded_load
from gpupoold.sim.planner.models import PlannedModel
from gpupoold.sim.planner.notes import notes_on
from gpupoold.sim.planner.plan import (
    Plan,
    PlanQuestion,
    chains,
    check_question,
    make_plan,
    models_below,
    next_round,
)
from gpupoold.sim.planner.run import Attained, Runner, Setup
from gpupoold.sim.presets import poisson_panel
from gpupoold.sim.run import run_point
from gpupoold.sim.scenario import Overrides
from tests.unit.sim.planner.questions import arrivals, question


@pytest.fixture(scope="module")
def tight() -> tuple[PlanQuestion, Plan]:
    """A box that is too small for its load."""
    asked = question("1xA10", 8, 0.15)
    return asked, make_plan(asked)


class TestPlan:
    def test_the_simulator_says_the_same(self) -> None:
        wanted = Overrides(
            policies=("gpupool",), models=(4,), rps=(0.2,), box=parse_box("1xH800"), duration_s=60.0
        )
        [point] = poisson_panel().changed(wanted).points()
        row = run_point(point)
        box = parse_box("1xH800")
        models = box_models(box, 4, Targets())
        load = poisson_load(dict.fromkeys(models, 0.2), 60.0)
        setup = Setup(box, load, models, seeds=(0,))
        assert Runner().attained(setup, "").overall == row["attainment"]
        shown = Runner().forecast(setup)
        assert shown.num_requests == row["requests"]
        assert shown.overall.ttft_s.p99 == row["ttft_p99_s"]

    def test_a_box_that_is_large_enough(self) -> None:
        plan = make_plan(question("4xA10", 3, 0.05))
        assert plan.fits
        assert plan.needed is not None
        assert plan.needed < 4
        assert plan.changes == ()
        assert plan.growth is not None
        assert plan.growth >= 1
        assert plan.growth_limit is None or plan.growth_limit > plan.growth

    @pytest.mark.slow
    def test_the_least_number_of_devices(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert not plan.fits
        assert plan.growth is None
        assert plan.needed is not None
        by_count = {one.num_devices: one.attained for one in plan.counts}
        assert by_count[plan.needed].reaches(asked.target)
        assert not by_count[plan.needed - 1].reaches(asked.target)
        assert by_count[1] == plan.attained

    def test_every_advice_was_simulated(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        enough = [one for one in plan.changes if one.attained.reaches(asked.target)]
        kinds = list(dict.fromkeys(one.kind for one in plan.changes))
        assert kinds == ["tbt", "ttft", "move", "load", "link", "gpu", "devices"]
        more = next(one for one in enough if one.kind == "devices")
        assert more.num_devices == plan.needed
        bigger = replace(asked, box=replace(asked.box, num_devices=more.num_devices))
        assert make_plan(bigger).attained == more.attained

    @pytest.mark.slow
    def test_it_repeats(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert make_plan(asked) == plan
        assert make_plan(replace(asked, seeds=(5, 6))).attained != plan.attained

    @pytest.mark.slow
    def test_every_run_must_reach_the_target(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        assert len(plan.attained.by_run) == 2
        low, high = sorted(plan.attained.by_run)
        assert low < high
        between = make_plan(replace(asked, target=(low + high) / 2))
        assert not between.fits

    def test_targets_out_of_reach(self) -> None:
        plan = make_plan(question("1xA10", 2, 0.1, Targets(10.0, 0.005)))
        assert not plan.fits
        assert plan.needed is None
        assert plan.counts[-1].num_devices <= 16
        assert not any(one.attained.reaches(0.99) for one in plan.changes)

    def test_a_larger_box_than_any_that_is_tried(self) -> None:
        asked = question("300xA10", 1, 1.0, Targets(0.01, 0.001))
        plan = make_plan(replace(asked, load=recorded_load(arrivals(0, model="m00"), "mine")))
        assert not plan.fits
        assert plan.needed is None
        assert [one.num_devices for one in plan.counts] == [300]

    def test_a_change_that_takes_all_requests_away_is_left_out(self) -> None:
        load = recorded_load(arrivals(*[0.01 * i for i in range(60)], model="m00"), "mine")
        plan = make_plan(question("1xA10", 2, 1.0, Targets(0.5, 0.02), load=load))
        assert not plan.fits
        kinds = {one.kind for one in plan.changes}
        assert "load" in kinds
        assert "move" not in kinds

    def test_the_engine_of_a_model_moves_with_the_model(self) -> None:
        asked = question("1xA10", 2, 1.0)
        host = HostWishes(own_engine_bytes=(("m00", 1), ("m01", 2)))
        setup = Setup(asked.box, asked.load, asked.models, asked.seeds, host=host)
        tried = [change for chain in chains(setup, (), None, None) for change in chain]
        moved = [change.setup for change in tried if change.kind == "move"]
        assert moved
        for less in moved:
            assert [name for name, _ in less.host.own_engine_bytes] == list(less.models)

    def test_the_latest_runs_are_not_run_again(self) -> None:
        asked = question("1xH800", 2, 0.1)
        runner = Runner()
        setup = Setup(asked.box, asked.load, asked.models, asked.seeds)
        attained = runner.attained(setup, "")
        assert runner.forecast(setup).overall.attainment == attained.overall
        assert runner.num_runs == 2
        runner.attained(replace(setup, load=asked.load.scaled(2)), "")
        assert runner.num_runs == 4
        assert runner.attained(setup, "") == attained
        assert runner.num_runs == 6

    def test_progress_reports(self) -> None:
        reported: list[tuple[str, int]] = []
        plan = make_plan(
            question("1xH800", 2, 0.1), lambda what, done: reported.append((what, done))
        )
        assert reported[0] == ("policy gpupool", 0)
        counts = [done for _, done in reported]
        assert counts == sorted(counts)
        assert counts[-1] < plan.num_runs

    def test_notes(self, tight: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = tight
        models = [PlannedModel(name, Targets(), 1, 1) for name in asked.models]
        notes = notes_on(asked, plan, dict.fromkeys(asked.models, "scaled"), models)
        assert f"decided by {plan.forecast.num_requests} simulated requests: 2 runs" in notes[0]
        scaled = "all models: not measured on A10, but scaled from other models or GPUs"
        assert any(scaled in note for note in notes)


class TestPolicies:
    def test_the_best_comes_first_with_its_split(self) -> None:
        asked = question("4xA10", 4, 0.1, policies=("aegaeon", "gpupool"))
        plan = make_plan(asked)
        first, second = plan.policies
        assert first.attained.worst >= second.attained.worst
        assert plan.attained == first.attained
        [aegaeon] = [one for one in plan.policies if one.policy == "aegaeon"]
        base = Setup(asked.box, asked.load, asked.models, asked.seeds, "aegaeon")
        splits = {
            count: Runner().attained(replace(base, num_prefill=count, seeds=(0,)), "").worst
            for count in (1, 2, 3)
        }
        assert aegaeon.num_prefill == max(splits, key=lambda count: splits[count])

    def test_refusals(self) -> None:
        plan = make_plan(question("1xA10", 3, 0.02, policies=("static", "aegaeon", "gpupool")))
        assert plan.policies[0].policy == "gpupool"
        refused = {one.policy: one.attained.refused for one in plan.policies[1:]}
        assert "models fit" in refused["static"]
        assert "two devices" in refused["aegaeon"]
        with pytest.raises(UsageError, match="aegaeon cannot run here: needs two devices"):
            make_plan(question("1xA10", 3, 0.02, policies=("aegaeon",)))

    @pytest.mark.parametrize("target", [0.0, -1.0, 1.01, float("nan")])
    def test_impossible_targets(self, target: float) -> None:
        with pytest.raises(UsageError, match="above 0 and at most 1"):
            check_question(target, ("gpupool",))

    def test_unknown_policy(self) -> None:
        with pytest.raises(UsageError, match="no policy is named 'best'"):
            check_question(0.99, ("best",))


@pytest.mark.parametrize(
    ("value", "after"), [(10.0, 15.0), (0.1, 0.15), (0.05, 0.075), (0.09, 0.1), (8.0, 10.0)]
)
def test_round_values(value: float, after: float) -> None:
    assert next_round(value) == pytest.approx(after)


def test_the_worst_models_come_first(tight: tuple[PlanQuestion, Plan]) -> None:
    _, plan = tight
    below = models_below(plan.forecast, 2.0)
    shares = [plan.forecast.models[name].attainment or 0.0 for name in below]
    assert shares == sorted(shares)
    assert len(below) == len(plan.forecast.models)


def test_confidence_grows_with_the_draws_that_reach_the_target() -> None:
    three = Attained(0.995, (0.99, 0.995, 1.0))
    assert three.confidence(0.99) == 7 / 8
    assert three.confidence(0.995) is None
    assert Attained(1.0, (1.0,)).confidence(0.99) is None
    assert Attained(1.0, (1.0,) * 5).confidence(0.99) == 31 / 32
