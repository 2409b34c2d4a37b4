"""Placement of models on nodes. Pure: nodes and models in, changes out.

Nodes are compared like the devices of a box (:mod:`gpupoold.scheduling.pressure`): a node has the
memory of all devices together, and models need shares of the devices' time. A model with work for
most of a node gets replicas, and the work is divided equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gpupoold.fleet.nodes import FleetSpec, Node, demand_of, shared
from gpupoold.scheduling.pressure import HomeDevice, ModelDemand, better_homes, pressure

# Share of a node's time for a model; a model with more work gets a further replica.
_FULL = 0.7
# A replica is removed if the remaining replicas would have at most this share.
_SPARE = 0.5
# Least gain for a move to a different node, because the weights are loaded anew.
_THRESHOLD = 0.3
# Loads of a node at the same time: a load slows the streams down.
_ADDITIONS = 1


@dataclass(frozen=True, slots=True)
class Change:
    """Add a model to a node, or remove it there."""

    kind: Literal["add", "remove"]
    model: str
    node: str
    why: str


def changes(
    specs: Mapping[str, FleetSpec], nodes: Mapping[str, Node], *, rebalances: bool = True
) -> list[Change]:
    """Return the changes due now; further changes follow later.

    Only models in ``specs`` are touched. A model is removed from a node
    when a different node serves the model and no request is left. ``rebalances`` False only
    replaces lost models.
    """
    usable = {name: one for name, one in nodes.items() if one.takes_requests and one.num_devices}
    if not usable:
        return []
    demands = {name: demand_of(spec, nodes) for name, spec in specs.items()}
    targets = _targets(specs, demands, usable, rebalances=rebalances)
    found = []
    for name in sorted(specs, key=lambda one: (-demands[one].load, one)):
        found += _missing(name, targets[name], usable)
        found += _superfluous(name, targets[name], nodes)
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
    usable: Mapping[str, Node],
    *,
    rebalances: bool,
) -> dict[str, set[str]]:
    """Return the wanted nodes of each model."""
    placed: dict[str, list[ModelDemand]] = {name: [] for name in usable}
    targets: dict[str, set[str]] = {}
    single: dict[str, ModelDemand] = {}
    for name in sorted(specs, key=lambda one: (-demands[one].load, one)):
        present = [node for node, one in usable.items() if one.model(name) is not None]
        num = num_replicas(demands[name], specs[name], usable, len(present))
        share = shared(demands[name], num)
        if num == 1 and len(present) <= 1:
            single[name] = share
            continue
        chosen = sorted(present, key=lambda node: _cost(usable[node], placed[node], share))[:num]
        others = [node for node in usable if node not in chosen and name not in usable[node].failed]
        others.sort(key=lambda node: (_cost(usable[node], placed[node], share), node))
        chosen += others[: num - len(chosen)]
        for node in chosen:
            placed[node].append(share)
        targets[name] = set(chosen)
    # Without a node for a model, no node shall have the model.
    targets |= {name: set() for name in single}
    homes = _homes(single, placed, usable, rebalances=rebalances)
    return targets | {name: {node} for name, node in homes.items()}


def _homes(
    single: Mapping[str, ModelDemand],
    placed: Mapping[str, Sequence[ModelDemand]],
    usable: Mapping[str, Node],
    *,
    rebalances: bool,
) -> dict[str, str]:
    """Return the node of each model with one replica, by the pressure on the nodes."""
    names = sorted(usable)
    devices, homes = [], dict[str, int]()
    for number, node in enumerate(names):
        # The homes have one node per model, so each replica gets a name known to a single node.
        replicas = {f"{one.model} on {node}": one for one in placed[node]}
        of_node = {
            name: _on(replace(one, model=name), usable[node])
            for name, one in {**single, **replicas}.items()
            if name not in usable[node].failed
        }
        devices.append(_as_device(number, usable[node], of_node))
        homes |= dict.fromkeys(replicas, number)
        homes |= {name: number for name in single if usable[node].model(name) is not None}
    found = better_homes(homes, devices, _THRESHOLD if rebalances else math.inf)
    return {name: names[found[name]] for name in single if name in found}


def _as_device(number: int, node: Node, demands: Mapping[str, ModelDemand]) -> HomeDevice:
    report = node.report
    bandwidth = max(report.bandwidth_bytes_per_s, 1.0) * node.num_devices
    return HomeDevice(number, sum(report.device_bytes), bandwidth, demands)


def _on(demand: ModelDemand, node: Node) -> ModelDemand:
    """Return work for one device as a share of a node's devices."""
    return shared(demand, node.num_devices)


def _cost(node: Node, others: Sequence[ModelDemand], more: ModelDemand) -> float:
    demands = {one.model: _on(one, node) for one in (*others, more)}
    return pressure(_as_device(0, node, demands), demands)


def _missing(name: str, targets: Iterable[str], usable: Mapping[str, Node]) -> list[Change]:
    had = any(one.model(name) is not None for one in usable.values())
    why = "more requests, or less pressure there" if had else "no other node has it"
    return [
        Change("add", name, node, why)
        for node in sorted(targets)
        if usable[node].model(name) is None and name not in usable[node].ongoing
    ]


def _superfluous(name: str, targets: Iterable[str], nodes: Mapping[str, Node]) -> list[Change]:
    """Return the removals of a model, if all wanted nodes serve the model."""
    wanted = set(targets)
    if not wanted or not all(nodes[node].serves(name) for node in wanted):
        return []
    return [
        Change("remove", name, node, f"served by {', '.join(sorted(wanted))}")
        for node, one in sorted(nodes.items())
        if node not in wanted
        and not one.is_lost
        and name not in one.ongoing
        and (model := one.model(name)) is not None
        and not model.num_live
    ]


def _limited(found: Sequence[Change], nodes: Mapping[str, Node]) -> list[Change]:
    """Return the changes without additions for which a node is too busy."""
    left = {name: _ADDITIONS - len(one.ongoing) for name, one in nodes.items()}
    kept = []
    for one in found:
        if one.kind == "add":
            left[one.node] -= 1
            if left[one.node] < 0:
                continue
        kept.append(one)
    return kept
