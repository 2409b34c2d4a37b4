"""Fixed roles beside the roles that the policy chooses: tried, bounded, and reported if better."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpupoold.domain import Role, Targets
from gpupoold.sim.boxes import parse_box
from gpupoold.sim.planner.load import poisson_load
from gpupoold.sim.planner.models import PlannedModel
from gpupoold.sim.planner.notes import notes_on
from gpupoold.sim.planner.plan import Plan, PlanQuestion, make_plan
from gpupoold.sim.planner.run import (
    Attained,
    FixedRoles,
    RolesTried,
    Runner,
    Setup,
    search_splits,
    try_fixed_roles,
)
from tests.unit.sim.planner.questions import question


@pytest.fixture(scope="module")
def prompts() -> tuple[PlanQuestion, Plan]:
    """One model with more load than two devices carry, which the policy does not split."""
    load = poisson_load({"m00": 6.0}, 20.0)
    asked = question("2xA10", 1, 6.0, Targets(1.0, 0.05), seeds=(0, 1, 2), load=load)
    return asked, make_plan(asked)


def setup_of(asked: PlanQuestion, **changes: object) -> Setup:
    setup = Setup(asked.box, asked.load, asked.models, asked.seeds)
    return replace(setup, **changes)  # type: ignore[arg-type]


class TestBetterRoles:
    def test_a_better_split_is_found_and_measured_in_all_draws(
        self, prompts: tuple[PlanQuestion, Plan]
    ) -> None:
        asked, plan = prompts
        roles = plan.fixed_roles
        assert roles is not None
        assert roles.best is not None
        assert [one.text for one in roles.tried] == ["2xmixed", "prefill,decode"]
        assert roles.best.text == "prefill,decode"
        fixed = setup_of(asked, num_prefill=1)
        assert fixed.roles == (Role.PREFILL, Role.DECODE)
        assert Runner().attained(fixed, "") == roles.best.attained
        assert roles.chosen == plan.attained
        assert roles.gain == pytest.approx(
            (roles.best.attained.overall or 0) - (plan.attained.overall or 0)
        )
        assert roles.is_better
        assert roles.confidence == 0.75, "the first draw chose the split"

    def test_it_is_the_first_change(self, prompts: tuple[PlanQuestion, Plan]) -> None:
        _, plan = prompts
        assert plan.fixed_roles is not None
        assert plan.fixed_roles.best is not None
        first = plan.changes[0]
        assert (first.kind, first.text) == ("roles", "fixed roles: prefill,decode")
        assert first.attained == plan.fixed_roles.best.attained

    def test_the_notes_have_the_number_of_trials(self, prompts: tuple[PlanQuestion, Plan]) -> None:
        asked, plan = prompts
        models = [PlannedModel(name, Targets(), 1, 1) for name in asked.models]
        notes = notes_on(asked, plan, dict.fromkeys(asked.models, "scaled"), models)
        assert any("tried 2 times, each in one draw; the draw that chose" in one for one in notes)


def test_no_trial_without_a_choice() -> None:
    asked = question("2xA10", 2, 0.05)
    late = Attained(0.9, (0.9, 0.9))
    runner = Runner()
    assert try_fixed_roles(runner, setup_of(asked), Attained(1.0, (1.0, 1.0))) is None
    assert try_fixed_roles(runner, setup_of(asked, policy="aegaeon"), late) is None
    assert try_fixed_roles(runner, setup_of(asked, box=parse_box("1xA10")), late) is None
    assert runner.num_runs == 0


def test_roles_that_are_no_better_in_the_first_draw_run_once() -> None:
    asked = question("3xA10", 4, 0.1)
    runner = Runner()
    roles = try_fixed_roles(runner, setup_of(asked), Attained(0.99, (1.0, 0.98)))
    assert roles is not None
    assert runner.num_runs == len(roles.tried) == 3
    assert roles.best is None
    assert not roles.is_better
    assert roles.gain is roles.confidence is None


def test_roles_of_a_setup() -> None:
    asked = question("2xA10", 2, 0.1)
    setup = setup_of(asked, num_prefill=0)
    assert setup.roles == (Role.MIXED, Role.MIXED)
    assert setup_of(asked).roles is None
    assert setup_of(asked, policy="aegaeon", num_prefill=1).roles is None


@pytest.mark.parametrize("best", [1, 5, 40, 63])
def test_the_search_is_bounded_and_ends_near_the_best(best: int) -> None:
    tried = search_splits(64, lambda count: Attained(0.5, (1 - abs(count - best) / 64,)))
    assert len(tried) <= 8 + 2 * 3
    assert abs(max(tried, key=lambda count: tried[count].worst) - best) <= 1
    assert set(search_splits(9, lambda count: Attained(0.5, (0.5,)))) == set(range(1, 9))


def test_better_in_every_draw_and_confidence() -> None:
    chosen = Attained(0.5, (0.4, 0.5, 0.6))

    def roles(*by_run: float) -> FixedRoles:
        return FixedRoles(chosen, (), RolesTried(1, "prefill,decode", Attained(0.6, by_run)))

    assert roles(0.5, 0.6, 0.7).confidence == 0.75
    assert not roles(0.5, 0.6, 0.6).is_better
    assert roles(0.5, 0.6, 0.6).confidence is None
    assert roles(0.5, 0.6, 0.7).gain == pytest.approx(0.1)
    assert FixedRoles(Attained(0.5, (0.4,)), (), roles(0.5).best).confidence is None
