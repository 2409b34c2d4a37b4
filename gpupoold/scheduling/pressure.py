"""Homes of models by pressure. Pure: demand in, homes out.

Prism (algorithm 1) places models by the pressure of requests on a device's memory. On a device
without room for all its models the scarce resource is time instead: the time for all models on
target, and the time of switches. The *pressure* of a device is the sum of both as a share of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import nlargest
from typing import NamedTuple

# The most pressed devices decide how many tokens are late. With this power the homes chosen for
# seven models on four A10 were the best of all 350 partitions in simulations.
_POWER = 4
# A turn for a waiting request takes about so long.
_LEAST_TURN_S = 0.25
# Homes pay where the longest window is so many times the shortest, and models are busy for so much
# of the time on average: found in simulations of two and four A10 with equal and mixed targets.
_LEAST_SPREAD = 4.0
_LEAST_BUSY = 0.8
_NUM_SOURCES = 3
_NUM_TARGETS = 4


@dataclass(frozen=True, slots=True)
class ModelDemand:
    """A model's expected work on devices of one kind.

    ``busy_share`` is the share of time with requests, ``load`` the share of a device's time that
    keeps these on target, ``window_s`` the time for which the model can be left with all requests
    ahead of their deadlines.
    """

    model: str
    load: float
    busy_share: float
    window_s: float
    weight_bytes: int
    kv_bytes: float

    @property
    def num_bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes


@dataclass(frozen=True, slots=True)
class HomeDevice:
    """A possible home; ``demands`` by the names of the hosted models.

    ``far_share`` of the bandwidth is left to copies of the models that are ``far``.
    """

    number: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    demands: Mapping[str, ModelDemand]
    far: frozenset[str] = frozenset()
    far_share: float = 1.0


class _Move(NamedTuple):
    """Models that change between two devices."""

    source: HomeDevice
    target: HomeDevice
    leave: tuple[str, ...]
    come: tuple[str, ...]


def pressure(device: HomeDevice, names: Iterable[str]) -> float:
    """Return the share of the device's time that the models and their switches need."""
    names = list(names)
    return _load(device, names) + _switching(device, [device.demands[name] for name in names])


def _load(device: HomeDevice, names: Iterable[str]) -> float:
    return sum(device.demands[name].load for name in names)


def homes_pay(device: HomeDevice) -> bool:
    """Return whether requests should keep to homes, although other devices may be idle.

    They should if a turn of another model is too long for a model in a hurry, targets differ so
    that models can be apart from those, and no device is idle for long.
    """
    demands = device.demands.values()
    largest = nlargest(2, demands, key=lambda demand: demand.num_bytes)
    if len(largest) < 2:
        return False
    absence_s = _absence_s(largest[0], largest[1], device)
    least_s, most_s = min(d.window_s for d in demands), max(d.window_s for d in demands)
    return (
        absence_s > _LEAST_TURN_S
        and least_s < 2 * absence_s
        and most_s >= _LEAST_SPREAD * least_s
        and sum(demand.busy_share for demand in demands) >= _LEAST_BUSY * len(demands)
    )


def switching_shares(device: HomeDevice, names: Sequence[str]) -> dict[str, float]:
    """Return the share of the device's time for switches because of each model of ``demands``.

    ``names`` are at home on the device. For a model at home the share would be saved without the
    model, for another model the share would be added.
    """
    demands = [device.demands[name] for name in names]
    present = _switching(device, demands)
    shares = {}
    for name, demand in device.demands.items():
        if name in names:
            without = [other for other in demands if other is not demand]
            shares[name] = present - _switching(device, without)
        else:
            shares[name] = _switching(device, [*demands, demand]) - present
    return shares


def _switching(device: HomeDevice, demands: Sequence[ModelDemand]) -> float:
    """Return the share of time for switches to each model, and back to the ``hurried`` model.

    The latter has the shortest window and a turn after each turn of another model. If the window is
    shorter than the absence, the answers are late in the meantime: lost time too.
    """
    if len(demands) < 2 or sum(demand.num_bytes for demand in demands) <= device.capacity_bytes:
        return 0.0
    hurried = min(demands, key=lambda demand: demand.window_s)
    largest, second = nlargest(2, demands, key=lambda demand: demand.num_bytes)
    idle_share = math.prod(1 - demand.busy_share for demand in demands)
    share = 0.0
    for demand in demands:
        if demand is hurried:
            continue
        others_idle = _idle_without(demand, demands, idle_share)
        lost_s = _copy_s(demand, second if demand is largest else largest, device)
        lost_s += _copy_s(hurried, demand, device)
        absence_s = lost_s + _LEAST_TURN_S
        if absence_s > hurried.window_s:
            lost_s += hurried.busy_share * absence_s
        share += demand.busy_share * (1 - others_idle) / demand.window_s * lost_s
    return share


def _idle_without(demand: ModelDemand, demands: Sequence[ModelDemand], idle_share: float) -> float:
    """Return the share of time without requests of the others; ``idle_share``: of all models."""
    if demand.busy_share < 1:
        return idle_share / (1 - demand.busy_share)
    return math.prod(1 - other.busy_share for other in demands if other is not demand)


def _absence_s(demand: ModelDemand, other: ModelDemand, device: HomeDevice) -> float:
    """Return the seconds for a short turn of another model, with both switches."""
    return _copy_s(demand, other, device) + _copy_s(other, demand, device) + _LEAST_TURN_S


def _copy_s(demand: ModelDemand, before: ModelDemand, device: HomeDevice) -> float:
    """Return the seconds to copy what a model lacks after a turn of ``before``."""
    short_bytes = demand.num_bytes + before.num_bytes - device.capacity_bytes
    missing_bytes = min(max(short_bytes, 0.0), demand.weight_bytes)
    share = device.far_share if demand.model in device.far else 1.0
    return missing_bytes / (share * device.bandwidth_bytes_per_s)


def better_homes(
    homes: Mapping[str, int], devices: Sequence[HomeDevice], threshold: float
) -> dict[str, int]:
    """Return homes with new models placed, and changed by at most one move or exchange.

    A model without a home gets the home with the least resulting pressure, the largest load first.
    Then the best move of a model to another device, or exchange of two, is made if the sum of the
    pressures' powers falls by more than the share ``threshold``.
    """
    by_number = {device.number: device for device in devices}
    chosen = {
        name: number
        for name, number in homes.items()
        if number in by_number and name in by_number[number].demands
    }
    placed: dict[int, list[str]] = {number: [] for number in by_number}
    for name, number in chosen.items():
        placed[number].append(name)
    known = {demand.model: demand for device in devices for demand in device.demands.values()}
    for name in sorted(known.keys() - chosen.keys(), key=lambda name: (-known[name].load, name)):
        able = [device for device in devices if name in device.demands]
        best = min(able, key=lambda device: _growth(device, placed[device.number], name))
        placed[best.number].append(name)
        chosen[name] = best.number
    move = _best_move(devices, placed, threshold)
    if move is not None:
        chosen |= dict.fromkeys(move.leave, move.target.number)
        chosen |= dict.fromkeys(move.come, move.source.number)
    return chosen


def _growth(device: HomeDevice, names: Sequence[str], more: str) -> float:
    return _cost(device, [*names, more]) - _cost(device, names)


def _cost(device: HomeDevice, names: Iterable[str]) -> float:
    return pressure(device, names) ** _POWER


def _best_move(
    devices: Sequence[HomeDevice], placed: Mapping[int, Sequence[str]], threshold: float
) -> _Move | None:
    """Return the best change that concerns the most pressed device with a good enough one.

    Only the most and the least pressed devices are tried, which bounds the time.
    """
    costs = {device.number: _cost(device, placed[device.number]) for device in devices}
    loads = {device.number: _load(device, placed[device.number]) for device in devices}
    least_gain = threshold * sum(costs.values())
    ranked = sorted(devices, key=lambda device: -costs[device.number])
    for source in ranked[:_NUM_SOURCES]:
        best, best_gain = None, least_gain
        for target in ranked[-_NUM_TARGETS:]:
            for move in _moves(source, target, placed) if target is not source else ():
                if _gain_of_loads(move, loads, costs) <= best_gain:
                    continue
                gain = _gain(move, placed, costs)
                if gain > best_gain:
                    best, best_gain = move, gain
        if best is not None:
            return best
    return None


def _moves(
    source: HomeDevice, target: HomeDevice, placed: Mapping[int, Sequence[str]]
) -> Iterable[_Move]:
    coming = [(), *((name,) for name in placed[target.number] if name in source.demands)]
    for name in placed[source.number]:
        if name in target.demands:
            for come in coming:
                yield _Move(source, target, (name,), come)


def _gain_of_loads(move: _Move, loads: Mapping[int, float], costs: Mapping[int, float]) -> float:
    """Return the gain of a move if switches took no time afterwards: quick, and never too small."""
    source, target, leave, come = move
    left = loads[source.number] - _load(source, leave) + _load(source, come)
    there = loads[target.number] + _load(target, leave) - _load(target, come)
    before = costs[source.number] + costs[target.number]
    return before - left**_POWER - there**_POWER


def _gain(move: _Move, placed: Mapping[int, Sequence[str]], costs: Mapping[int, float]) -> float:
    source, target = move.source, move.target
    left = [name for name in placed[source.number] if name not in move.leave]
    there = [name for name in placed[target.number] if name not in move.come]
    before = costs[source.number] + costs[target.number]
    return before - _cost(source, [*left, *move.come]) - _cost(target, [*there, *move.leave])
