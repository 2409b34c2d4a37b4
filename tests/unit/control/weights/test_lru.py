"""Who goes for whom, and who is loaded when."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, strategies as st

from gpupoold.control.weights.cache import Candidate, choose_victims, start_order


def snapshot(model: str, num_bytes: int, last_used_at: float, **flags: bool) -> Candidate[str]:
    return Candidate(model, num_bytes, last_used_at, **flags)


A, B, C = snapshot("a", 10, 1.0), snapshot("b", 10, 2.0), snapshot("c", 10, 3.0)


class TestVictims:
    def test_the_least_recently_used_go_first(self) -> None:
        assert choose_victims([C, A, B], 10) == ["a"]
        assert choose_victims([C, A, B], 11) == ["a", "b"]
        assert choose_victims([C, A, B], 30) == ["a", "b", "c"]

    def test_nothing_goes_for_nothing(self) -> None:
        assert choose_victims([A], 0) == []
        assert choose_victims([], 0) == []

    def test_too_few(self) -> None:
        assert choose_victims([A, B, C], 31) is None
        assert choose_victims([], 1) is None

    def test_pinned_and_busy_ones_stay(self) -> None:
        pinned, busy = snapshot("p", 10, 0.0, is_pinned=True), snapshot("r", 10, 0.0, is_busy=True)
        assert choose_victims([pinned, busy, B], 10) == ["b"]
        assert choose_victims([pinned, busy, B], 11) is None

    def test_a_small_one_is_spared_when_a_larger_one_has_to_go(self) -> None:
        small, large = snapshot("small", 1, 1.0), snapshot("large", 50, 2.0)
        assert choose_victims([small, large], 50) == ["large"]
        assert choose_victims([small, large], 51) == ["small", "large"]


class TestOrder:
    def test_all_fit(self) -> None:
        assert start_order([A, C, B], 30) == ["c", "b", "a"]
        assert start_order([], 0) == []

    def test_pinned_ones_come_first(self) -> None:
        pinned = snapshot("p", 10, 0.0, is_pinned=True)
        assert start_order([A, C, pinned, B], 40) == ["p", "c", "b", "a"]

    def test_others_come_before_the_last_that_stay(self) -> None:
        assert start_order([A, B, C], 20) == ["c", "a", "b"]
        old = [snapshot(f"old-{number}", 10, -float(number)) for number in range(2)]
        assert start_order([A, B, C, *old], 20) == ["c", "a", "old-0", "old-1", "b"]

    def test_others_of_which_none_fits_beside_the_first(self) -> None:
        assert start_order([snapshot("old", 20, 0.0), A, B], 20) == ["old", "b", "a"]

    def test_one_that_never_fits_keeps_no_other_out(self) -> None:
        assert start_order([snapshot("huge", 100, 0.0), A, B], 20) == ["huge", "b", "a"]


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[Candidate[str]], int]:
    sizes = draw(st.lists(st.integers(1, 40), max_size=8))
    times = draw(st.permutations(range(len(sizes))))
    snapshots = [
        snapshot(str(number), size, float(times[number]), is_pinned=draw(st.booleans()))
        for number, size in enumerate(sizes)
    ]
    pinned_bytes = sum(one.num_bytes for one in snapshots if one.is_pinned)
    return snapshots, draw(st.integers(max(40, pinned_bytes), 200 + pinned_bytes))


@given(boxes())
def test_loading_in_this_order_leaves_the_best(box: tuple[list[Candidate[str]], int]) -> None:
    """Played through, with snapshots going as they do: never over the budget, no model left out."""
    snapshots, budget_bytes = box
    by_name = {one.key: one for one in snapshots}
    order = start_order(snapshots, budget_bytes)
    assert sorted(order) == sorted(by_name)
    cached: list[Candidate[str]] = []
    for name in order:
        used_bytes = sum(one.num_bytes for one in cached)
        victims = choose_victims(cached, used_bytes + by_name[name].num_bytes - budget_bytes)
        assert victims is not None, "a pinned snapshot was loaded too early"
        cached = [one for one in cached if one.key not in victims]
        cached.append(by_name[name])
    kept = _expected(snapshots, budget_bytes)
    assert kept <= {one.key for one in cached}


def _expected(snapshots: Sequence[Candidate[str]], budget_bytes: int) -> set[str]:
    """Pinned ones, then the most recently used, up to the first that does not fit."""
    kept: set[str] = set()
    for one in sorted(snapshots, key=lambda one: (not one.is_pinned, -one.last_used_at)):
        budget_bytes -= one.num_bytes
        if budget_bytes < 0:
            break
        kept.add(one.key)
    return kept
