import math

from gpupoold.domain import Targets
from gpupoold.scheduling.request_level import RequestLevelScheduler
from gpupoold.scheduling.turns import SwitchCost

COST = SwitchCost({}, {}, all_fit=True)


def scheduler(*models: str) -> RequestLevelScheduler:
    made = RequestLevelScheduler()
    for model in models:
        made.add_model(model, Targets(1.0, 0.1))
    return made


def test_serves_one_model_until_it_has_nothing_left() -> None:
    one = scheduler("a", "b")
    one.arrive("a", "a1", 0.0)
    one.arrive("b", "b1", 1.0)
    turn = one.next_turn(1.0, COST)
    assert turn is not None
    assert turn.model == "a"
    one.arrive("a", "a2", 2.0)
    one.finish("a", "a1")
    assert not one.turn_is_over(turn, 100.0)
    one.finish("a", "a2")
    assert one.turn_is_over(turn, 100.0)
    following = one.next_turn(100.0, COST)
    assert following is not None
    assert following.model == "b"


def test_the_earliest_request_decides_who_is_next() -> None:
    one = scheduler("a", "b", "c")
    one.arrive("c", "c1", 3.0)
    one.arrive("b", "b1", 1.0)
    one.arrive("a", "a1", 2.0)
    turn = one.next_turn(4.0, COST)
    assert turn is not None
    assert (turn.model, one.upcoming()) == ("b", "a")


def test_nothing_to_do() -> None:
    one = scheduler("a")
    assert one.next_turn(0.0, COST) is None
    assert one.upcoming() is None
    assert one.next_deadline_s("a") == math.inf


def test_deadlines_follow_progress() -> None:
    one = scheduler("a")
    one.arrive("a", "a1", 2.0)
    assert one.next_deadline_s("a") == 3.0
    one.progress("a", "a1", 5)
    one.progress("a", "gone", 5)
    assert one.next_deadline_s("a") == 3.5
    assert (one.num_live("a"), one.working_models()) == (1, ["a"])
