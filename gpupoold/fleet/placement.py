"""Placement of models on nodes. Pure: nodes and models in, changes out.

Nodes are compared like the devices of a box (:mod:`gpupoold.scheduling.pressure`): a node has the
memory of all devices together, and models need shares of the devices' time. A model with work for
most of a node gets replicas, and the work is divided equally.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gpupoold.api.schemas_fleet import FleetModel
from gpupoold.fleet.nodes import LEAST_LOAD, FleetSpec, Node, demand_of, shared
from gpupoold.scheduling.pressure import HomeDevice, ModelDemand, pressure

# Share of a node's time for a model; a model with more work gets a further replica.
_FULL = 0.7
# A replica is removed if the remaining replicas would have at most this share.
_SPARE = 0.5
# Least gain for a move to a different node, because the weights are loaded anew.
_THRESHOLD = 0.3
# The exponent of homes, see :mod:`gpupoold.scheduling.pressure`.
_POWER = 4
_MOST_TRIED = 8
# Loads of a node at the same time: a load slows the streams down.
_ADDITIONS = 1


@dataclass(frozen=True, slots=True)
class Change:
    """Add a model to a node, remove it there, or bring its weights to the node's host memory."""

    kind: Literal["add", "remove", "warm"]
    model: str
    node: str
    why: str


def changes(
    specs: Mapping[str, FleetSpec], nodes: Mapping[str, Node], *, rebalances: bool = True
) -> list[Change]:
    """Return the changes due now; further changes follow later.

    Only models in ``specs`` are touched. A model is removed from a node when a different node
    serves the model and no request is left. ``rebalances`` False only replaces lost models.
    """
    usable = {name: one for name, one in nodes.items() if one.takes_requests and one.num_devices}
    if not usable:
        return []
    having: dict[str, dict[str, FleetModel]] = {name: {} for name in specs}
    for node in nodes.values():
        for model in node.report.models:
            if model.name in having:
                having[model.name][node.name] = model
    demands = {name: demand_of(spec, having[name].values()) for name, spec in specs.items()}
    targets = _targets(specs, demands, having, usable, rebalances=rebalances)
    found = []
    for name in sorted(specs, key=lambda one: (-demands[one].load, one)):
        found += _missing(name, targets[name], having[name], usable)
        found += _superfluous(name, targets[name], having[name], nodes)
        if demands[name].load > LEAST_LOAD:
            found += _cold(name, targets[name], having[name], usable)
    return _limited(found, nodes)


def num_replicas(demand: ModelDemand, spec: FleetSpec, nodes: Mapping[str, Node], has: int) -> int:
    """Return the number of nodes for a model, where ``has`` nodes have the model now."""
    most = max(one.num_devices for one in nodes.values())
    wanted = math.ceil(demand.load / (_FULL * most))
    if wanted < has:
        wanted = max(wanted, math.ceil(demand.load / (_SPARE * most)))
        wanted = min(wanted, has)
    return min(max(wanted, spec.least_replicas, 1), len(nodes))


def _targets(
    specs: Mapping[str, FleetSpec],
    demands: Mapping[str, ModelDemand],
    having: Mapping[str, Mapping[str, FleetModel]],
    usable: Mapping[str, Node],
    *,
    rebalances: bool,
) -> dict[str, set[str]]:
    """Return the wanted nodes of each model."""
    placed: dict[str, list[ModelDemand]] = {name: [] for name in usable}
    targets: dict[str, set[str]] = {}
    single: dict[str, ModelDemand] = {}
    for name in sorted(specs, key=lambda one: (-demands[one].load, one)):
        there = [node for node in having[name] if node in usable]
        num = num_replicas(demands[name], specs[name], usable, len(there))
        share = shared(demands[name], num)
        if num == 1 and len(there) <= 1:
            single[name] = share
            continue
        chosen = sorted(there, key=lambda node: _growth(usable[node], placed[node], share))[:num]
        others = [node for node in usable if node not in chosen and name not in usable[node].failed]
        others.sort(key=lambda node: (_growth(usable[node], placed[node], share), node))
        chosen += others[: num - len(chosen)]
        for node in chosen:
            placed[node].append(share)
        targets[name] = set(chosen)
    # Without a node for a model, no node shall have the model.
    targets |= {name: set() for name in single}
    present = {name: [node for node in having[name] if node in usable] for name in single}
    homes = _homes(single, present, placed, usable, rebalances=rebalances)
    return targets | {name: {node} for name, node in homes.items()}


def _homes(
    single: Mapping[str, ModelDemand],
    present: Mapping[str, Sequence[str]],
    placed: Mapping[str, Sequence[ModelDemand]],
    usable: Mapping[str, Node],
    *,
    rebalances: bool,
) -> dict[str, str]:
    """Return the node of each model with one replica, as far as decided in this round.

    ``present`` has the nodes with each model now.
    """
    hosted = {name: list(placed[name]) for name in usable}
    homes = {}
    for name, demand in single.items():
        if present[name]:
            homes[name] = present[name][0]
            hosted[homes[name]].append(demand)
    # Each node adds one model at a time, so the remaining models may wait for a later round.
    missing = [name for name in single if name not in homes][: len(usable)]
    for name in missing:
        able = [node for node in sorted(usable) if name not in usable[node].failed]
        if able:
            home = min(able, key=lambda node: _growth(usable[node], hosted[node], single[name]))
            homes[name] = home
            hosted[home].append(single[name])
    if rebalances and not missing:
        homes |= _best_move(homes, single, hosted, usable)
    return homes


def _best_move(
    homes: Mapping[str, str],
    single: Mapping[str, ModelDemand],
    hosted: Mapping[str, Sequence[ModelDemand]],
    usable: Mapping[str, Node],
) -> dict[str, str]:
    """Return a new home for a model of the most pressed node, if worth a load, else nothing.

    Only the models with most work and the least pressed nodes are tried, which bounds the time.
    """
    costs = {node: _cost(usable[node], hosted[node]) for node in usable}
    source, *others = sorted(costs, key=lambda node: -costs[node])
    movable = [name for name, node in homes.items() if node == source]
    movable.sort(key=lambda name: -single[name].load)
    best, gain = dict[str, str](), _THRESHOLD * sum(costs.values())
    for name in movable[:_MOST_TRIED]:
        left = [one for one in hosted[source] if one.model != name]
        relief = costs[source] - _cost(usable[source], left)
        for target in others[-_MOST_TRIED:]:
            if name in usable[target].failed:
                continue
            found = relief - _growth(usable[target], hosted[target], single[name])
            if found > gain:
                best, gain = {name: target}, found
    return best


def _cost(node: Node, models: Sequence[ModelDemand]) -> float:
    """Return the cost of a node's pressure: the most pressed nodes count most."""
    demands = {one.model: shared(one, node.num_devices) for one in models}
    report = node.report
    bandwidth = max(report.bandwidth_bytes_per_s, 1.0) * node.num_devices
    device = HomeDevice(0, sum(report.device_bytes), bandwidth, demands)
    return pressure(device, demands) ** _POWER


def _growth(node: Node, models: Sequence[ModelDemand], more: ModelDemand) -> float:
    return _cost(node, [*models, more]) - _cost(node, models)


def _missing(
    name: str,
    targets: Iterable[str],
    having: Mapping[str, FleetModel],
    usable: Mapping[str, Node],
) -> list[Change]:
    had = any(node in usable for node in having)
    why = "more requests, or less pressure there" if had else "no other node has it"
    return [
        Change("add", name, node, why)
        for node in sorted(targets)
        if node not in having and name not in usable[node].ongoing
    ]


def _superfluous(
    name: str,
    wanted: Collection[str],
    having: Mapping[str, FleetModel],
    nodes: Mapping[str, Node],
) -> list[Change]:
    """Return the removals of a model, if all wanted nodes serve the model."""
    if not wanted or not all(nodes[node].serves(name) for node in wanted):
        return []
    return [
        Change("remove", name, node, f"served by {', '.join(sorted(wanted))}")
        for node, model in sorted(having.items())
        if node not in wanted
        and not nodes[node].is_lost
        and name not in nodes[node].ongoing
        and not model.num_live
    ]


def _cold(
    name: str,
    targets: Iterable[str],
    having: Mapping[str, FleetModel],
    usable: Mapping[str, Node],
) -> list[Change]:
    """Return the loads of a requested model's weights where free host memory has room for them."""
    return [
        Change("warm", name, node, "the model's other node may die")
        for node in sorted(targets)
        if usable[node].serves(name)
        and name not in usable[node].ongoing | usable[node].failed
        and having[node].first_token_in_s is None
        and not having[node].num_live
        and having[node].weights_bytes <= usable[node].report.cache_free_bytes
    ]


def _limited(found: Sequence[Change], nodes: Mapping[str, Node]) -> list[Change]:
    """Return the changes without loads for which a node is too busy."""
    left = {name: _ADDITIONS - len(one.ongoing) for name, one in nodes.items()}
    kept = []
    for one in found:
        if one.kind != "remove":
            left[one.node] -= 1
            if left[one.node] < 0:
                continue
        kept.append(one)
    return kept
