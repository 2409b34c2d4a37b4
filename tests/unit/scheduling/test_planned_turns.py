"""The value of a planned turn counts the requests that can still be in time."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling.events import ModelCosts
from gpupoold.scheduling.policies.planned_turns import (
    BatchWork,
    PlannedTurn,
    Switching,
    Tuning,
    plan_turn,
    rank_planned_turns,
)
from gpupoold.scheduling.rules import Rule
from gpupoold.scheduling.state import Batch, Model, Request, RequestPhase

TUNING = Tuning()
NO_SWITCH = Switching(TUNING.turn_min_s, is_exposed=False)
COSTS = ModelCosts(prefill_base_s=0.2, prefill_token_s=0.0, decode_base_s=0.025)
NOW_S = 1000.0


def prompts(model: Model, count: int, due_in_s: float) -> list[Request]:
    """Requests whose first token is due then; how many of them there are is in their names."""
    arrival_s = NOW_S + due_in_s - model.targets.ttft_s
    return [
        Request(f"{due_in_s}-{n}", model, arrival_s, 10, None, phase=RequestPhase.QUEUED)
        for n in range(count)
    ]


def turn_to(*requests: Request, prefills_only: bool = False) -> PlannedTurn:
    model = requests[0].model
    batch = Batch(model)
    for request in requests:
        batch.add(request)
    work = BatchWork(
        model,
        list(requests),
        batch.deadlines_s,
        batch.step_s(),
        batch.prefill_s(),
        batch.num_waiting,
        True,
        batch.speed,
    )
    return plan_turn(work, NOW_S, 0.0, NO_SWITCH, TUNING, prefills_only=prefills_only)


def rule_of(planned_turn: PlannedTurn) -> Rule:
    [(rule, _)] = [(rule, group) for rule, group in rank_planned_turns([planned_turn]) if group]
    return rule


@pytest.fixture
def model() -> Model:
    return Model("m", Targets(10.0, 0.1), 10**9, 1000, COSTS)


@pytest.mark.parametrize("prefills_only", [False, True])
def test_expired_prompts_do_not_make_others_worthless(model: Model, prefills_only: bool) -> None:
    hopeful = prompts(model, 3, due_in_s=4.0)
    alone = turn_to(*hopeful, prefills_only=prefills_only)
    behind = turn_to(*prompts(model, 100, due_in_s=-5.0), *hopeful, prefills_only=prefills_only)
    assert rule_of(alone) is rule_of(behind) is Rule.DEADLINE
    assert behind.tokens_in_time == pytest.approx(alone.tokens_in_time)
    assert behind.duration_s > alone.duration_s + 19.0  # expired requests are prefilled too


def test_prompts_that_can_be_in_time_do_not_wait_for_late_ones(model: Model) -> None:
    """A hundred prompts take 20 s, and are due in 4.1 s: as many as twenty are in time."""
    planned_turn = turn_to(*prompts(model, 100, due_in_s=4.1))
    twenty = turn_to(*prompts(model, 20, due_in_s=4.1))
    assert planned_turn.tokens_in_time == pytest.approx(twenty.tokens_in_time, rel=0.05)
    assert planned_turn.duration_s > twenty.duration_s + 15.0  # late requests are prefilled too
    assert rule_of(planned_turn) is Rule.DEADLINE


def test_what_is_due_beyond_the_window_is_ahead(model: Model) -> None:
    assert rule_of(turn_to(*prompts(model, 3, due_in_s=9.0))) is Rule.AHEAD
    assert rule_of(turn_to(*prompts(model, 3, due_in_s=7.0))) is Rule.DEADLINE


def test_of_expired_turns_the_one_that_catches_up_first_goes_first() -> None:
    """A batch that is 3 s late needs 75 steps of 25 ms, one of 1 s a third of them."""
    found = []
    for name, late_s in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        model = Model(name, Targets(10.0, 0.1), 10**9, 1000, COSTS)
        arrival_s = NOW_S - late_s - 10.1
        request = Request(name, model, arrival_s, 10, None, RequestPhase.DECODING, num_tokens=1)
        found.append(turn_to(request))
    [ranked] = [group for rule, group in rank_planned_turns(found) if group]
    assert [turn.model for turn in ranked] == ["b", "c", "a"]
    assert [turn.catch_up_s for turn in ranked] == pytest.approx([1 / 3, 2 / 3, 1.0])


def test_only_expired_requests_have_no_value(model: Model) -> None:
    assert rule_of(turn_to(*prompts(model, 3, due_in_s=-1.0))) is Rule.EXPIRED
