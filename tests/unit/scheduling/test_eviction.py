"""The order in which models give pages up."""

from __future__ import annotations

from dataclasses import replace

from gpupoold.scheduling.eviction import Eviction, PageHolding, Victim, plan_evictions

FREE, WEIGHTS, LIVE = Victim.FREE_KV, Victim.WEIGHTS, Victim.LIVE_KV
ANEW = Victim.RECOMPUTE


def idle(model: str, idle_s: float = 0.0, ttft_s: float = 1.0) -> PageHolding:
    return PageHolding(model, 0, idle_s, ttft_s, float("inf"), 10, 3, 0)


def paused(model: str, next_deadline_s: float) -> PageHolding:
    return PageHolding(model, 2, 0.0, 1.0, next_deadline_s, 10, 3, 5)


def names(evictions: list[Eviction]) -> list[tuple[str, Victim]]:
    return [(eviction.model, eviction.victim) for eviction in evictions]


def test_nothing_is_evicted_for_nothing() -> None:
    assert plan_evictions(0, [idle("a"), paused("b", 1.0)]) == []
    assert plan_evictions(-3, [idle("a")]) == []
    assert plan_evictions(5, []) == []


def test_free_kv_goes_first_then_idle_weights() -> None:
    holdings = [paused("p", 9.0), idle("i")]
    assert names(plan_evictions(1, holdings)) == [("i", FREE)]
    assert names(plan_evictions(4, holdings)) == [("i", FREE), ("p", FREE)]
    assert names(plan_evictions(7, holdings)) == [("i", FREE), ("p", FREE), ("i", WEIGHTS)]


def idle_weights(*holdings: PageHolding) -> list[str]:
    return [e.model for e in plan_evictions(1000, holdings) if e.victim is WEIGHTS]


def test_of_models_idle_about_as_long_the_larger_ttft_target_goes_first() -> None:
    """Instants of a clock are never equal: what was used a moment earlier has no right to stay."""
    new = idle("new", 3.0, 20.0)
    tight, loose = idle("tight", 61.25, 0.5), idle("loose", 61.0, 9.0)
    assert idle_weights(new, tight, loose) == ["loose", "tight", "new"]


def test_of_equal_targets_the_least_recently_used_goes_first() -> None:
    assert idle_weights(idle("b", 61.0), idle("c", 0.5), idle("a", 61.25)) == ["a", "b", "c"]


def test_what_has_been_idle_for_much_longer_goes_first_whatever_its_target() -> None:
    assert idle_weights(idle("hours", 7200.0, 0.5), idle("minute", 60.0, 9.0)) == [
        "hours",
        "minute",
    ]


def test_paused_kv_latest_deadline_first_when_it_suffices() -> None:
    holdings = [paused("soon", 1.0), paused("late", 9.0)]
    plan = plan_evictions(6 + 6, holdings)
    assert names(plan) == [("late", FREE), ("soon", FREE), ("late", LIVE), ("soon", LIVE)]


def test_paused_weights_go_before_kv_when_kv_alone_is_too_little() -> None:
    holdings = [paused("soon", 1.0), paused("late", 9.0)]
    assert names(plan_evictions(6 + 11, holdings))[2:] == [("late", WEIGHTS), ("soon", WEIGHTS)]
    everything = plan_evictions(1000, holdings)
    assert names(everything)[2:] == [
        ("late", WEIGHTS),
        ("soon", WEIGHTS),
        ("late", LIVE),
        ("soon", LIVE),
    ]
    assert sum(eviction.num_pages for eviction in everything) == 36


def test_kv_that_an_engine_is_late_to_free_can_be_had() -> None:
    late = PageHolding("late", 0, 0.0, 1.0, float("inf"), 0, 0, 4)
    assert plan_evictions(2, [late]) == [Eviction("late", LIVE, 4)]


def test_kv_without_room_on_the_host_is_dropped_at_the_very_last() -> None:
    soon, late = paused("soon", 1.0), replace(paused("late", 9.0), movable_kv_pages=2)
    everything = plan_evictions(1000, [soon, late])
    assert names(everything)[2:] == [
        ("late", WEIGHTS),
        ("soon", WEIGHTS),
        ("late", LIVE),
        ("soon", LIVE),
        ("late", ANEW),
    ]
    assert [one.num_pages for one in everything[4:]] == [2, 5, 3]
    # What need not be dropped is not.
    assert ("late", ANEW) not in names(plan_evictions(3 + 3 + 10 + 10 + 2 + 5, [soon, late]))


def test_what_the_host_has_no_room_for_makes_no_room() -> None:
    """Five pages of KV would do, but only two can move: weights go before it."""
    full = replace(paused("p", 1.0), movable_kv_pages=2)
    assert names(plan_evictions(3 + 5, [full])) == [("p", FREE), ("p", WEIGHTS)]
    assert names(plan_evictions(3 + 2, [full])) == [("p", FREE), ("p", LIVE)]
