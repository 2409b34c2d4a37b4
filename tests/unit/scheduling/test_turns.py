"""The turn scheduler: rounds, quotas, and requests that come and go."""

from __future__ import annotations

import pytest

from gpupoold.domain import Targets
from gpupoold.scheduling.turns import SwitchCost, Turn, TurnScheduler


def scheduler_of(*models: str, ttft_s: float = 10.0, tbt_s: float = 0.1) -> TurnScheduler:
    scheduler = TurnScheduler()
    for model in models:
        scheduler.add_model(model, Targets(ttft_s, tbt_s))
    return scheduler


def cost(
    *models: str, switch_s: float = 0.0, full_s: float = 1.0, all_fit: bool = True
) -> SwitchCost:
    return SwitchCost(dict.fromkeys(models, switch_s), dict.fromkeys(models, full_s), all_fit)


def next_turn(scheduler: TurnScheduler, now_s: float, **costs: float | bool) -> Turn:
    models = scheduler.working_models()
    turn = scheduler.next_turn(now_s, cost(*models, **costs))  # type: ignore[arg-type]
    assert turn is not None
    return turn


def test_without_work_there_is_no_turn() -> None:
    scheduler = scheduler_of("a", "b")
    assert scheduler.next_turn(0.0, cost("a", "b")) is None
    assert not scheduler.has_work()


def test_counts() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r1", 1.0)
    scheduler.arrive("a", "r2", 2.0)
    assert (scheduler.num_live("a"), scheduler.num_waiting("a")) == (2, 2)
    scheduler.progress("a", "r1", 3)
    scheduler.progress("a", "unknown", 3)
    assert (scheduler.num_live("a"), scheduler.num_waiting("a")) == (2, 1)
    assert scheduler.live_requests("a") == ["r1", "r2"]
    assert scheduler.working_models() == ["a"]
    assert scheduler.has_work()
    scheduler.finish("a", "r1")
    scheduler.finish("a", "r1")
    assert scheduler.live_requests("a") == ["r2"]


def test_next_deadline_is_the_earliest() -> None:
    scheduler = scheduler_of("a", ttft_s=2.0, tbt_s=0.5)
    assert scheduler.next_deadline_s("a") == float("inf")
    scheduler.arrive("a", "old", 1.0)
    scheduler.arrive("a", "new", 2.0)
    assert scheduler.next_deadline_s("a") == 3.0
    scheduler.progress("a", "old", 4)
    assert scheduler.next_deadline_s("a") == 4.0
    scheduler.finish("a", "new")
    assert scheduler.next_deadline_s("a") == 5.0


def test_each_working_model_gets_one_turn_a_round_by_deadline() -> None:
    scheduler = scheduler_of("a", "b", "c", "idle")
    for model, arrival_s in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        scheduler.arrive(model, "r", arrival_s)
    order = [next_turn(scheduler, 5.0).model for _ in range(6)]
    assert order == ["b", "c", "a", "b", "c", "a"]


def test_at_equal_deadlines_the_resident_model_leads() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    turn = scheduler.next_turn(0.0, SwitchCost({"a": 1.0, "b": 0.0}, {"a": 1.0, "b": 1.0}, True))
    assert turn is not None
    assert turn.model == "b"


def test_a_newcomer_waits_for_the_next_round() -> None:
    scheduler = scheduler_of("a", "b", "new")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 1.0)
    assert next_turn(scheduler, 2.0).model == "a"
    scheduler.arrive("new", "r", -100.0)
    assert [next_turn(scheduler, 2.0).model for _ in range(4)] == ["b", "new", "a", "b"]


def test_a_model_whose_requests_were_cancelled_loses_its_turn() -> None:
    scheduler = scheduler_of("a", "b", "c")
    for model in "abc":
        scheduler.arrive(model, "r", 0.0)
    assert next_turn(scheduler, 0.0).model == "a"
    scheduler.finish("b", "r")
    assert [next_turn(scheduler, 0.0).model for _ in range(3)] == ["c", "a", "c"]


def test_a_removed_model_is_gone_at_once() -> None:
    scheduler = scheduler_of("a", "b", "c")
    for model in "abc":
        scheduler.arrive(model, "r", 0.0)
    running = next_turn(scheduler, 0.0)
    scheduler.remove_model("b")
    scheduler.remove_model("a")
    assert scheduler.turn_is_over(running, 0.0)
    assert [next_turn(scheduler, 0.0).model for _ in range(2)] == ["c", "c"]


def test_a_turn_ends_when_its_quota_is_used_and_others_wait() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    turn = next_turn(scheduler, 100.0, switch_s=0.5)
    assert turn.ends_at_s == pytest.approx(100.5 + turn.quota_s)
    assert not scheduler.turn_is_over(turn, turn.ends_at_s - 1e-6)
    assert scheduler.turn_is_over(turn, turn.ends_at_s)


def test_a_lone_model_never_loses_its_turn() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    turn = next_turn(scheduler, 0.0)
    assert not scheduler.turn_is_over(turn, 1e9)
    scheduler.arrive("b", "r", 1e9)
    assert scheduler.turn_is_over(turn, 1e9)
    assert next_turn(scheduler, 1e9).model == "a"  # its deadline is the earlier one
    assert next_turn(scheduler, 1e9).model == "b"


def test_a_turn_ends_with_its_last_request() -> None:
    scheduler = scheduler_of("a")
    scheduler.arrive("a", "r", 0.0)
    turn = next_turn(scheduler, 0.0)
    scheduler.finish("a", "r")
    assert scheduler.turn_is_over(turn, 0.0)


def test_quotas_follow_observed_steps() -> None:
    scheduler = scheduler_of("slow", "fast")
    for _ in range(200):
        scheduler.observe_step("slow", 0.04)
        scheduler.observe_step("fast", 0.01)
    scheduler.arrive("slow", "r", 0.0)
    scheduler.arrive("fast", "r", 1.0)
    slow, fast = next_turn(scheduler, 2.0), next_turn(scheduler, 2.0)
    assert slow.quota_s == pytest.approx(4 * fast.quota_s, rel=1e-3)


@pytest.mark.parametrize("step_s", [0.0, 1e-300])
def test_immeasurably_short_steps_do_no_harm(step_s: float) -> None:
    scheduler = scheduler_of("a", "b")
    for _ in range(10_000):
        scheduler.observe_step("a", step_s)
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    assert 1e-6 <= next_turn(scheduler, 0.0, switch_s=0.1).quota_s < 4.0


def test_c5_through_the_scheduler() -> None:
    scheduler = scheduler_of("a", "b", "c", ttft_s=1000.0)
    for _ in range(200):
        for model in "abc":
            scheduler.observe_step(model, 0.025)
    for model in "abc":
        scheduler.arrive(model, "r", 0.0)
    turns = [next_turn(scheduler, 0.0, switch_s=0.0, full_s=1.0, all_fit=False) for _ in range(3)]
    assert [turn.quota_s for turn in turns] == pytest.approx([4.0] * 3)


def test_a_round_leaves_a_newcomer_time_to_be_prefilled() -> None:
    scheduler = scheduler_of("a", "b", ttft_s=2.0)
    for _ in range(200):
        scheduler.observe_step("a", 0.04)
        scheduler.observe_step("b", 0.04)
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    turns = [next_turn(scheduler, 0.0, full_s=0.2, all_fit=False) for _ in range(2)]
    assert sum(turn.quota_s for turn in turns) + 0.4 == pytest.approx(0.9 * 2.0)


def test_when_all_fit_only_what_is_missing_counts() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    free = [next_turn(scheduler, 0.0, switch_s=0.0, full_s=5.0) for _ in range(2)]
    assert sum(turn.quota_s for turn in free) <= 0.1


def test_a_quota_is_never_shorter_than_a_step() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    turns = [next_turn(scheduler, 0.0, switch_s=1e-9) for _ in range(2)]
    assert [turn.quota_s for turn in turns] == pytest.approx([0.02, 0.02])


def test_new_targets_count_for_requests_under_way() -> None:
    scheduler = scheduler_of("a", "b")
    scheduler.arrive("a", "r", 0.0)
    scheduler.arrive("b", "r", 0.0)
    scheduler.set_targets("b", Targets(1.0, 0.05))
    assert scheduler.next_deadline_s("b") == 1.0
    assert next_turn(scheduler, 0.0).model == "b"
