"""Tests of ``fleet/placement.py``."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from gpupoold.fleet import placement
from gpupoold.fleet.cluster import FleetSpec, Node
from gpupoold.fleet.placement import Change, changes
from gpupoold.scheduling.pressure import pressure
from tests.unit.fleet.fleets import GIB, model, node, nodes, report, spec, specs


def settled(
    wanted: dict[str, FleetSpec], fleet: dict[str, Node], load: float = 0.0
) -> dict[str, Node]:
    """The nodes when nothing is left to change; every change is carried out at once."""
    for _ in range(50):
        due = changes(wanted, fleet)
        if not due:
            return fleet
        for one in due:
            there = fleet[one.node]
            models = [each for each in there.report.models if each.name != one.model]
            if one.kind == "add":
                assert there.model(one.model) is None
                models.append(model(one.model, load=load))
            fleet = fleet | {one.node: replace(there, report=report(*models))}
    raise AssertionError(f"no end: {due}")


def homes(fleet: dict[str, Node]) -> dict[str, list[str]]:
    return {name: [one.name for one in each.report.models] for name, each in fleet.items()}


def test_models_are_spread() -> None:
    fleet = nodes(node("a"), node("b"), node("c"))
    placed = homes(settled(specs(*(spec(f"m{n}") for n in range(6))), fleet))
    assert [len(each) for each in placed.values()] == [2, 2, 2]


def test_the_least_number_of_replicas() -> None:
    fleet = settled(specs(spec("m", 2)), nodes(node("a"), node("b"), node("c")))
    assert sum(map(len, homes(fleet).values())) == 2
    fleet = settled(specs(spec("m", 9)), nodes(node("a"), node("b")))
    assert sum(map(len, homes(fleet).values())) == 2


def test_a_model_that_fills_a_node_gets_replicas_and_loses_them_again() -> None:
    busy = node("a", model("m", load=1.8))
    assert changes(specs(spec("m")), nodes(busy, node("b"))) == [
        Change("add", "m", "b", "more requests, or less pressure there")
    ]
    idle = nodes(node("a", model("m", load=0.1)), node("b", model("m", load=0.1)))
    (change,) = changes(specs(spec("m")), idle)
    assert change.kind == "remove"
    # Neither in between: the number stays as it is.
    kept = nodes(node("a", model("m", load=0.55)), node("b", model("m", load=0.55)))
    assert not changes(specs(spec("m")), kept)


def test_what_was_on_a_lost_node_is_placed_anew() -> None:
    fleet = nodes(node("a", model("m"), is_lost=True), node("b"))
    (change,) = changes(specs(spec("m")), fleet)
    assert (change.kind, change.node) == ("add", "b")


def test_a_node_is_drained_when_another_one_serves() -> None:
    drained = node("a", model("m", num_live=1), is_draining=True)
    (change,) = changes(specs(spec("m")), nodes(drained, node("b")))
    assert (change.kind, change.node) == ("add", "b")
    loading = node("b", model("m", state="loading"))
    assert not changes(specs(spec("m")), nodes(drained, loading))
    served = node("b", model("m"))
    (change,) = changes(specs(spec("m")), nodes(drained, served))
    assert (change.kind, change.node) == ("retire", "a"), "a request is left"
    empty = node("a", model("m"), is_draining=True)
    (change,) = changes(specs(spec("m")), nodes(empty, served))
    assert (change.kind, change.node) == ("remove", "a")


def test_a_node_loads_one_model_at_a_time() -> None:
    fleet = nodes(node("a"))
    assert len(changes(specs(spec("m"), spec("n")), fleet)) == 1
    assert not changes(specs(spec("m"), spec("n")), nodes(node("a", ongoing=frozenset({"m"}))))


def test_lost_models_are_loaded_several_at_a_time() -> None:
    lost = node("a", *(model(f"m{n}") for n in range(9)), is_lost=True)
    wanted = specs(*(spec(f"m{n}") for n in range(9)), spec("new"))
    due = changes(wanted, nodes(lost, node("b")))
    assert [(one.kind, one.node) for one in due] == [("add", "b")] * 4
    assert "new" not in {one.model for one in due}
    busy = node("b", ongoing=frozenset({"m0", "m1", "m2"}))
    assert len(changes(wanted, nodes(lost, busy))) == 1


def test_a_node_that_could_not_add_a_model_is_not_asked_again() -> None:
    failing = node("a", failed=frozenset({"m"}))
    assert not changes(specs(spec("m")), nodes(failing))
    (change,) = changes(specs(spec("m")), nodes(failing, node("b", model("x"), model("y"))))
    assert change.node == "b"


def test_replicas_of_requested_models_stay_in_host_memory() -> None:
    def due(free_bytes: int, load: float = 0.2, **changed: Any) -> list[Change]:
        cold = node("b", model("m", first_token_in_s=None, **changed))
        cold.report.cache_free_bytes = free_bytes
        return changes(specs(spec("m", 2)), nodes(node("a", model("m", load=load)), cold))

    (change,) = due(16 * GIB)
    assert (change.kind, change.node) == ("warm", "b")
    assert not due(15 * GIB), "no other weights are evicted"
    assert not due(16 * GIB, load=0.0), "nobody asks for it"
    assert not due(16 * GIB, num_live=1), "its requests load it"


def test_models_of_others_are_left_alone() -> None:
    fleet = nodes(node("a", model("theirs")), node("b", model("theirs")))
    assert not changes(specs(), fleet)
    assert not changes(specs(spec("m")), {})


def with_loads(homes: dict[str, list[str]], loads: dict[str, float]) -> dict[str, Node]:
    """Nodes of eight devices with the models of ``homes``, whose replicas share the work."""
    found: dict[str, list[Any]] = {name: [] for name in "abcde"}
    for name, there in homes.items():
        for one in there:
            found[one].append(model(name, load=loads[name] / len(there), busy_share=0.5))
    given = [node(name, *models) for name, models in found.items()]
    for each in given:
        each.report.device_bytes = [80 * GIB] * 8
    return nodes(*given)


@pytest.mark.parametrize("seed", range(5))
def test_unequal_loads_are_levelled_and_then_all_stays(seed: int) -> None:
    rng = Random(seed)
    loads = {f"m{n}": 7.0 / (n + 1) ** 1.1 for n in range(60)}
    homes = {name: [rng.choice("abcde")] for name in loads}
    wanted = specs(*map(spec, loads))

    def largest() -> float:
        return max(
            sum(loads[name] / len(there) for name, there in homes.items() if one in there)
            for one in "abcde"
        )

    before = largest()
    for _ in range(100):
        due = changes(wanted, with_loads(homes, loads))
        for one in due:
            homes[one.model] = sorted({*homes[one.model]} ^ {one.node})
        if not due:
            break
    assert not due, "models go to and fro"
    assert largest() <= before
    assert largest() < 6.5, "the mean is 5.3"


def test_pressed_models_are_parted() -> None:
    """Two busy models on one node move apart when that is worth a load, and only if asked."""
    both = node("a", model("m", load=0.9, busy_share=0.9), model("n", load=0.9, busy_share=0.9))
    fleet = nodes(both, node("b"))
    wanted = specs(spec("m"), spec("n"))
    assert not changes(wanted, fleet, rebalances=False)
    (change,) = changes(wanted, fleet)
    assert (change.kind, change.node) == ("add", "b")


def test_memory_counts() -> None:
    """A node whose memory is full of busy models is no place for another one."""
    full = [
        model(f"x{n}", weights_bytes=120 * GIB, busy_share=0.5, load=0.1, window_s=1.0)
        for n in range(3)
    ]
    lost = node("c", model("m", weights_bytes=70 * GIB), is_lost=True)
    fleet = nodes(node("a", *full), node("b", model("y", load=0.5)), lost)
    wanted = specs(spec("m"), spec("y"), *(spec(one.name) for one in full))
    (added,) = [one for one in changes(wanted, fleet, rebalances=False) if one.model == "m"]
    assert added.node == "b"


def test_large_fleets_take_few_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pressure takes time by the square of a node's models; the controller has many of both."""
    num = 0

    def counted(*arguments: Any) -> float:
        nonlocal num
        num += 1
        return pressure(*arguments)

    monkeypatch.setattr(placement, "pressure", counted)
    given_nodes = [
        node(f"n{n}", *(model(f"m{n}-{k}", load=0.02, busy_share=0.1) for k in range(19)))
        for n in range(40)
    ]
    wanted = specs(*(spec(f"m{n}-{k}") for n in range(40) for k in range(20)))
    due = changes(wanted, nodes(*given_nodes))
    assert len(due) == 40
    assert num <= 2 * 40 * 40 + 3 * 40
    num = 0
    changes(specs(*(spec(f"m{n}-{k}") for n in range(40) for k in range(19))), nodes(*given_nodes))
    assert num <= 500


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.sampled_from("abcdefgh"), st.integers(1, 3), st.floats(0, 2)),
        max_size=8,
        unique_by=lambda one: one[0],
    ),
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.sets(st.sampled_from("abcdefgh"), max_size=8)),
        min_size=1,
        max_size=4,
    ),
)
def test_no_model_is_lost(
    wanted: list[tuple[str, int, float]], given_nodes: list[tuple[bool, bool, set[str]]]
) -> None:
    """Removals leave each model where it is served, and additions go where it is not."""
    loads = {name: load for name, _, load in wanted}
    fleet = nodes(
        *(
            node(
                f"n{number}",
                *(model(name, load=loads.get(name, 0.0)) for name in sorted(names)),
                is_draining=is_draining,
                is_lost=is_lost,
            )
            for number, (is_draining, is_lost, names) in enumerate(given_nodes)
        )
    )
    due = changes(specs(*(spec(name, least) for name, least, _ in wanted)), fleet)
    for one in due:
        there = fleet[one.node]
        assert not there.is_lost
        if one.kind == "add":
            assert there.takes_requests
            assert there.model(one.model) is None
    for name in loads:
        removed = {one.node for one in due if one.model == name and one.kind == "remove"}
        serving = {key for key, one in fleet.items() if one.takes_requests and one.serves(name)}
        assert not removed or serving - removed
