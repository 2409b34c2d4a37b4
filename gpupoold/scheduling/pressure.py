"""Homes of models by pressure. Pure: demand in, homes out.

Prism (algorithm 1) places models by the pressure of requests on a device's memory. On a device
without room for all its models the scarce resource is time instead: the time for all models on
target, and the time of switches. The *pressure* of a device is the sum of both as a share of time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# The most pressed devices decide how many tokens are late. With this power the homes chosen for
# seven models on four A10 were the best of all 350 partitions in simulations.
_POWER = 4
# A turn for a waiting request takes about so long.
_LEAST_TURN_S = 0.25


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
    """A possible home; ``demands`` by the names of the hosted models."""

    number: int
    capacity_bytes: int
    bandwidth_bytes_per_s: float
    demands: Mapping[str, ModelDemand]


class _Move(NamedTuple):
    """Models that change between two devices."""

    source: HomeDevice
    target: HomeDevice
    leave: tuple[str, ...]
    come: tuple[str, ...]


def pressure(device: HomeDevice, names: Iterable[str]) -> float:
    """Return the share of the device's time that the models and their switches need."""
    demands = [device.demands[name] for name in names]
    return sum(one.load for one in demands) + _switching(device, demands)


def has_hurried(device: HomeDevice) -> bool:
    """Return whether a model has a window of less than two absences for turns of another."""
    largest = sorted(device.demands.values(), key=lambda one: -one.num_bytes)[:2]
    if len(largest) < 2:
        return False
    absence_s = _absence_s(largest[0], largest[1], device)
    is_exposed = absence_s > _LEAST_TURN_S
    return is_exposed and any(one.window_s < 2 * absence_s for one in device.demands.values())


def switching_growth(device: HomeDevice, names: Sequence[str], more: str) -> float:
    """Return the further share of the device's time for switches with one more model."""
    demands = [device.demands[name] for name in names]
    return _switching(device, [*demands, device.demands[more]]) - _switching(device, demands)


def _switching(device: HomeDevice, demands: Sequence[ModelDemand]) -> float:
    if len(demands) < 2 or sum(one.num_bytes for one in demands) <= device.capacity_bytes:
        return 0.0
    hurried, *rest = sorted(demands, key=lambda one: one.window_s)
    return sum(_switching_to(one, hurried, demands, device) for one in rest)


def _switching_to(
    demand: ModelDemand, hurried: ModelDemand, demands: Sequence[ModelDemand], device: HomeDevice
) -> float:
    """Return the share of time for switches to a model, and back to the ``hurried`` model.

    The latter has the shortest window and a turn after each turn of another model. If the window is
    shorter than the absence, the answers are late in the meantime: lost time too.
    """
    others = [one for one in demands if one is not demand]
    idle_share = math.prod(1 - one.busy_share for one in others)
    largest = max(others, key=lambda one: one.num_bytes)
    lost_s = _copy_s(demand, largest, device) + _copy_s(hurried, demand, device)
    absence_s = lost_s + _LEAST_TURN_S
    if absence_s > hurried.window_s:
        lost_s += hurried.busy_share * absence_s
    return demand.busy_share * (1 - idle_share) / demand.window_s * lost_s


def _absence_s(one: ModelDemand, other: ModelDemand, device: HomeDevice) -> float:
    """Return the seconds for a short turn of another model, with both switches."""
    return _copy_s(one, other, device) + _copy_s(other, one, device) + _LEAST_TURN_S


def _copy_s(demand: ModelDemand, before: ModelDemand, device: HomeDevice) -> float:
    """Return the seconds to copy what a model lacks after a turn of ``before``."""
    short_bytes = demand.num_bytes + before.num_bytes - device.capacity_bytes
    missing_bytes = min(max(short_bytes, 0.0), demand.weight_bytes)
    return missing_bytes / device.bandwidth_bytes_per_s


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
    known = {one.model: one for device in devices for one in device.demands.values()}
    for name in sorted(known.keys() - chosen.keys(), key=lambda one: (-known[one].load, one)):
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
    """Return the best change that concerns the most pressed device with a good enough one."""
    costs = {device.number: _cost(device, placed[device.number]) for device in devices}
    least_gain = threshold * sum(costs.values())
    for source in sorted(devices, key=lambda one: -costs[one.number]):
        moves = [
            (_gain(move, placed, costs), move)
            for target in devices
            if target is not source
            for move in _moves(source, target, placed)
        ]
        gain, move = max(moves, key=lambda one: one[0], default=(0.0, None))
        if move is not None and gain > least_gain:
            return move
    return None


def _moves(
    source: HomeDevice, target: HomeDevice, placed: Mapping[int, Sequence[str]]
) -> Iterable[_Move]:
    coming = [(), *((name,) for name in placed[target.number] if name in source.demands)]
    for name in placed[source.number]:
        if name in target.demands:
            for come in coming:
                yield _Move(source, target, (name,), come)


def _gain(move: _Move, placed: Mapping[int, Sequence[str]], costs: Mapping[int, float]) -> float:
    source, target = move.source, move.target
    left = [one for one in placed[source.number] if one not in move.leave]
    there = [one for one in placed[target.number] if one not in move.come]
    before = costs[source.number] + costs[target.number]
    return before - _cost(source, [*left, *move.come]) - _cost(target, [*there, *move.leave])
