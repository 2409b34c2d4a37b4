"""Eviction plans for any holdings: enough when there is enough, and no more than needed."""

from __future__ import annotations

import itertools

from hypothesis import given, strategies as st

from gpupoold.scheduling.eviction import PageHolding, Victim, plan_evictions

PAGES = st.integers(0, 50)
TIMES = st.floats(0, 1e6)
HOLDINGS = st.lists(
    st.builds(
        PageHolding,
        model=st.integers(0, 99).map(str),
        num_live=st.integers(0, 2),
        idle_s=TIMES,
        ttft_s=TIMES,
        next_deadline_s=TIMES,
        weight_pages=PAGES,
        free_kv_pages=PAGES,
        live_kv_pages=PAGES,
        movable_kv_pages=st.none() | PAGES,
    ),
    max_size=6,
    unique_by=lambda holding: holding.model,
)


def pages_of(holding: PageHolding, victim: Victim) -> int:
    movable = holding.movable_kv_pages
    moved = holding.live_kv_pages if movable is None else min(movable, holding.live_kv_pages)
    return {
        Victim.FREE_KV: holding.free_kv_pages,
        Victim.WEIGHTS: holding.weight_pages,
        Victim.LIVE_KV: moved,
        Victim.RECOMPUTE: holding.live_kv_pages - moved,
    }[victim]


@given(st.integers(-5, 900), HOLDINGS)
def test_enough_and_not_more(num_pages: int, holdings: list[PageHolding]) -> None:
    plan = plan_evictions(num_pages, holdings)
    by_model = {holding.model: holding for holding in holdings}
    for eviction in plan:
        assert eviction.num_pages == pages_of(by_model[eviction.model], eviction.victim) > 0
    assert len({(eviction.model, eviction.victim) for eviction in plan}) == len(plan)
    there = sum(pages_of(holding, victim) for holding in holdings for victim in Victim)
    taken = sum(eviction.num_pages for eviction in plan)
    if num_pages <= 0:
        assert plan == []
    elif there >= num_pages:
        assert taken - plan[-1].num_pages < num_pages <= taken
    else:
        assert taken == there


@given(st.integers(1, 900), HOLDINGS)
def test_kinder_victims_come_first(num_pages: int, holdings: list[PageHolding]) -> None:
    plan = plan_evictions(num_pages, holdings)
    idle = {holding.model for holding in holdings if not holding.num_live}

    def harm(model: str, victim: Victim) -> int:
        if victim in (Victim.FREE_KV, Victim.RECOMPUTE):
            return 0 if victim is Victim.FREE_KV else 3
        return 1 if victim is Victim.WEIGHTS and model in idle else 2

    harms = [harm(eviction.model, eviction.victim) for eviction in plan]
    assert harms == sorted(harms)
    weights = [e.model for e in plan if e.victim is Victim.WEIGHTS and e.model in idle]
    by_model = {holding.model: holding for holding in holdings}
    for one, later in itertools.pairwise([by_model[model] for model in weights]):
        idle_s, later_idle_s = max(one.idle_s, 1.0), max(later.idle_s, 1.0)
        assert idle_s >= 0.5 * later_idle_s
        assert idle_s >= later_idle_s or one.ttft_s >= later.ttft_s
    kinds = {(e.victim, e.model in idle) for e in plan}
    if (Victim.LIVE_KV, False) in kinds and (Victim.WEIGHTS, False) in kinds:
        order = [e.victim for e in plan if e.model not in idle and e.victim is not Victim.FREE_KV]
        kindest = [Victim.WEIGHTS, Victim.LIVE_KV, Victim.RECOMPUTE]
        assert order == sorted(order, key=kindest.index)
