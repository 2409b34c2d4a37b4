"""Pressure of models on devices, and the homes that follow."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

import pytest

from gpupoold.scheduling.pressure import (
    HomeDevice,
    ModelDemand,
    better_homes,
    homes_pay,
    pressure,
    switching_shares,
)

GB = 10**9
# Seven models on four A10: their loads, shares of time with requests, windows in seconds, GB.
SEVEN = (
    ("qwen", 0.75, 0.99, 1.4, 15.2),
    ("coder", 0.58, 0.83, 0.7, 15.2),
    ("llama", 0.38, 1.0, 2.8, 15.2),
    ("yi", 0.46, 0.99, 2.8, 17.6),
    ("translate", 0.25, 1.0, 7.0, 17.6),
    ("support", 0.40, 1.0, 1.4, 15.2),
    ("summaries", 0.11, 1.0, 21.0, 17.6),
)


def demand(
    name: str, load: float = 0.4, busy: float = 1.0, window_s: float = 7.0, weight_gb: float = 15.0
) -> ModelDemand:
    return ModelDemand(name, load, busy, window_s, int(weight_gb * GB), 0.0)


def device(
    *demands: ModelDemand, number: int = 0, capacity_gb: float = 20.0, far: Sequence[str] = ()
) -> HomeDevice:
    by_name = {one.model: one for one in demands}
    return HomeDevice(number, int(capacity_gb * GB), 25.0 * GB, by_name, frozenset(far), 0.4)


def four_a10() -> list[HomeDevice]:
    demands = [demand(*row) for row in SEVEN]
    return [device(*demands, number=number, capacity_gb=21.7) for number in range(4)]


def settled(
    devices: Sequence[HomeDevice], homes: Mapping[str, int], threshold: float = 0.0
) -> dict[str, int]:
    """The homes after as many changes as are made."""
    present = dict(homes)
    for _ in range(50):
        later = better_homes(present, devices, threshold)
        if later == present:
            return present
        present = later
    raise AssertionError("the homes change for ever")


def groups(homes: Mapping[str, int]) -> set[frozenset[str]]:
    numbers = set(homes.values())
    return {frozenset(name for name in homes if homes[name] == one) for one in numbers}


def test_models_that_fit_together_add_their_loads() -> None:
    one = device(demand("a"), demand("b", 0.3), capacity_gb=30.0)
    assert pressure(one, []) == 0.0
    assert pressure(one, ["a"]) == pytest.approx(0.4)
    assert pressure(one, ["a", "b"]) == pytest.approx(0.7)
    assert not homes_pay(one)


def test_a_home_is_near_the_snapshot() -> None:
    demands = [demand(name) for name in "abcd"]
    near = {0: "ab", 1: "cd"}
    devices = [
        device(*demands, number=number, far=sorted({*"abcd"} - {*names}))
        for number, names in near.items()
    ]
    assert settled(devices, {"a": 0, "b": 1, "c": 0, "d": 1}) == {"a": 0, "b": 0, "c": 1, "d": 1}


def test_switches_cost_time_where_models_do_not_fit() -> None:
    """10 of 15 GB are missing at each switch: 0.4 s there and 0.4 s back, once in 10 s."""
    one = device(demand("a", window_s=7.0), demand("b", window_s=10.0))
    assert pressure(one, ["a", "b"]) == pytest.approx(0.8 + 0.8 / 10)
    assert pressure(one, ["a", "b"]) == pressure(one, ["b", "a"])
    assert switching_shares(one, ["a"])["b"] == pytest.approx(0.08)
    assert switching_shares(one, ["a", "b"])["b"] == pytest.approx(0.08)
    assert not homes_pay(one)


def test_a_model_that_is_rarely_busy_needs_few_switches() -> None:
    one = device(demand("a", window_s=7.0), demand("b", busy=0.1, window_s=10.0))
    assert pressure(one, ["a", "b"]) == pytest.approx(0.8 + 0.1 * 0.8 / 10)


def test_a_model_in_a_hurry_loses_its_absence() -> None:
    """The absence of 0.8 s and the other's turn is longer than the window of 0.7 s."""
    one = device(demand("a", busy=0.5, window_s=0.7), demand("b", window_s=10.0))
    assert pressure(one, ["a", "b"]) == pytest.approx(0.8 + 0.5 / 10 * (0.8 + 0.5 * 1.05))
    assert not homes_pay(one), "idle for a quarter of the time"


def test_homes_pay_where_targets_differ_and_models_are_busy() -> None:
    """The absence of a model is 1.05 s."""
    hurried, patient = demand("a", window_s=1.4), demand("b", window_s=7.0)
    assert homes_pay(device(hurried, patient))
    assert not homes_pay(device(hurried))
    assert not homes_pay(device(hurried, demand("b", window_s=5.0))), "nearly the same targets"
    assert not homes_pay(device(hurried, demand("b", busy=0.5, window_s=7.0))), "often idle"
    assert not homes_pay(device(demand("a", window_s=2.2), demand("b", window_s=9.0)))
    assert not homes_pay(device(hurried, patient, capacity_gb=30.0)), "both fit"


def test_seven_models_get_the_best_of_all_partitions() -> None:
    devices = four_a10()
    found = settled(devices, {})
    best = min(all_homes(), key=lambda homes: cost(devices, homes))
    assert groups(found) == groups(best)
    assert groups(found) == {
        frozenset({"qwen"}),
        frozenset({"coder", "summaries"}),
        frozenset({"llama", "support"}),
        frozenset({"yi", "translate"}),
    }


def all_homes() -> Iterator[dict[str, int]]:
    """All homes of the seven models; the first stays, because the devices are equal."""
    names = [row[0] for row in SEVEN]
    for numbers in itertools.product(range(4), repeat=len(names) - 1):
        yield dict(zip(names, (0, *numbers), strict=True))


def cost(devices: Sequence[HomeDevice], homes: Mapping[str, int]) -> float:
    placed = [[name for name in homes if homes[name] == one.number] for one in devices]
    return sum(pressure(one, names) ** 4 for one, names in zip(devices, placed, strict=True))


def test_from_the_worst_homes_one_change_at_a_time() -> None:
    devices = four_a10()
    present = dict.fromkeys((row[0] for row in SEVEN), 0)
    later = better_homes(present, devices, 0.1)
    assert 1 <= sum(later[name] != present[name] for name in present) <= 2
    assert cost(devices, settled(devices, present, 0.1)) < 1.25 * min(
        cost(devices, homes) for homes in all_homes()
    )


def test_a_small_gain_moves_nothing() -> None:
    devices = [device(demand("a"), demand("b", 0.39), demand("c", 0.41), number=n) for n in (0, 1)]
    homes = {"a": 0, "b": 0, "c": 1}
    assert better_homes(homes, devices, 0.1) == homes


def test_a_model_lives_only_where_it_is_hosted() -> None:
    a, b = demand("a"), demand("b")
    devices = [device(a, number=0), device(a, b, number=1)]
    assert settled(devices, {}) == {"a": 0, "b": 1}
    assert settled(devices, {"a": 1, "b": 0, "gone": 0}) == {"a": 0, "b": 1}
    assert better_homes({"a": 7}, devices[:1], 0.1) == {"a": 0}
    assert better_homes({"a": 7}, [], 0.1) == {}
