"""Tests of ``fleet/routing.py``."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gpupoold.access.rates import RateUse
from gpupoold.fleet.routing import RateGrowth, RateSums

NODES = ("a", "b", "c")


def test_a_node_gets_the_use_of_the_other_nodes() -> None:
    sums = RateSums()
    for node in NODES:
        sums.counted(node, {"web": RateUse(100, 1000)})  # from before the controller
    sums.counted("a", {"web": RateUse(103, 1000)})
    sums.counted("b", {"web": RateUse(100, 1050), "app": RateUse(1, 2)})
    assert sums.elsewhere("a") == {"web": RateUse(0, 50), "app": RateUse(1, 2)}
    assert sums.elsewhere("b") == {"web": RateUse(3, 0)}
    assert sums.elsewhere("c") == {"web": RateUse(3, 50), "app": RateUse(1, 2)}


def test_a_restarted_daemon_counts_from_zero() -> None:
    sums = RateSums()
    sums.counted("a", {})
    sums.counted("a", {"web": RateUse(10, 70)})
    sums.counted("a", {"web": RateUse(2, 5)})
    sums.counted("a", {"web": RateUse(2, 6)})
    assert sums.elsewhere("b") == {"web": RateUse(12, 76)}


_USE = st.tuples(st.sampled_from(NODES), st.integers(0, 5), st.integers(0, 500))


@given(uses=st.lists(_USE, max_size=30), lost=st.sets(st.integers(0, 29)))
def test_each_node_is_charged_all_use_elsewhere_once(
    uses: list[tuple[str, int, int]], lost: set[int]
) -> None:
    sums = RateSums()
    counts = dict.fromkeys(NODES, RateUse())
    charged = dict.fromkeys(NODES, RateUse())
    growths = {node: RateGrowth() for node in NODES}

    def round_of_messages() -> None:
        for node in NODES:
            due = growths[node].due(1, sums.elsewhere(node))
            charged[node] += due.get("web", RateUse())
            sums.counted(node, {"web": counts[node]})

    round_of_messages()
    for at, (node, num_requests, num_tokens) in enumerate(uses):
        counts[node] += RateUse(num_requests, num_tokens)
        if at not in lost:
            round_of_messages()
    round_of_messages()
    round_of_messages()
    total = sum(counts.values(), RateUse())
    assert charged == {node: total - counts[node] for node in NODES}
