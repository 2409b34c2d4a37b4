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

from gpupoold.api.schemas_access import FleetModel
from gpupoold.fleet.cluster import LEAST_LOAD, FleetSpec, Node, demand_of, shared
from gpupoold.scheduling.pressure import HomeDevice, ModelDemand, pressure

# Share of a node's time for a model; a model with more work gets a further replica.
_FULL = 0.7
# A replica is removed if the remaining replicas would have at most this share.
_SPARE = 0.5
# Models leave nodes of at least this pressure, for a gain of this share of the cost of the node,
# because the weights are loaded anew. A tenth of the nodes give models away at a time.
_PRESSED, _THRESHOLD, _SOURCES = 0.6, 0.1, 10
# The exponent of homes, see :mod:`gpupoold.scheduling.pressure`.
_POWER = 4
_MOST_TRIED = 8
# Loads of a node at the same time: a load slows the streams down. Requests wait for lost models.
_ADDITIONS, _ADDITIONS_OF_LOST = 1, 4


@dataclass(frozen=True, slots=True)
class Change:
    """Add a model to a node, remove it there, or bring its weights to the node's host memory.

    ``retire``: requests go to the model's other nodes, until the node has none and the model is
    removed there.
    """

    kind: Literal["add", "remove", "warm", "retire"]
    model: str
    node: str
    why: str


def changes(
    specs: Mapping[str, FleetSpec], nodes: Mapping[str, Node], *, rebalances: bool = True
) -> list[Change]:
    """Return the changes due now; further changes follow later.

    Only models in ``specs`` are touched. A model is removed from a node when a different node
    serves the model and no request is left, and retired until then. ``rebalances`` False only
    replaces lost models.
    """
    usable = {
        name: node for name, node in nodes.items() if node.takes_requests and node.num_devices
    }
    if not usable:
        return []
    having: dict[str, dict[str, FleetModel]] = {name: {} for name in specs}
    for node in nodes.values():
        for model in node.report.models:
            if model.name in having:
                having[model.name][node.name] = model
    work = [demand_of(spec, having[name].values()) for name, spec in specs.items()]
    # The models with most work go first, here and below.
    demands = {
        demand.model: demand
        for demand in sorted(work, key=lambda demand: (-demand.load, demand.model))
    }
    targets = _targets(specs, demands, having, usable, rebalances=rebalances)
    found = []
    for name in demands:
        found += _missing(name, targets[name], having[name], usable)
        found += _superfluous(name, targets[name], having[name], nodes)
        if demands[name].load > LEAST_LOAD:
            found += _cold(name, targets[name], having[name], usable)
    lost = {
        name
        for name, there in having.items()
        if there and all(nodes[node].is_lost for node in there)
    }
    return _limited(found, nodes, lost)


def num_replicas(demand: ModelDemand, spec: FleetSpec, nodes: Mapping[str, Node], has: int) -> int:
    """Return the number of nodes for a model, where ``has`` nodes have the model now."""
    most = max(node.num_devices for node in nodes.values())
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
    present = {name: [node for node in having[name] if node in usable] for name in specs}
    hosted = _hosted(present, demands, usable)
    # Without a node for a model, no node shall have the model.
    targets: dict[str, set[str]] = {name: set() for name in specs}
    single: dict[str, ModelDemand] = {}
    for name, demand in demands.items():
        there = present[name]
        num = num_replicas(demand, specs[name], usable, len(there))
        share = shared(demand, num)
        if num == 1 and len(there) <= 1:
            single[name] = share
            continue
        for node in there:
            del hosted[node][name]
        chosen = sorted(there, key=lambda node: _growth(usable[node], hosted[node], share))[:num]
        others = [node for node in usable if node not in chosen and name not in usable[node].failed]
        others.sort(key=lambda node: (_growth(usable[node], hosted[node], share), node))
        chosen += others[: num - len(chosen)]
        for node in chosen:
            hosted[node][name] = share
        targets[name] = set(chosen)
    homes = _homes(single, present, hosted, usable, rebalances=rebalances)
    return targets | {name: {node} for name, node in homes.items()}


def _hosted(
    present: Mapping[str, Sequence[str]],
    demands: Mapping[str, ModelDemand],
    usable: Mapping[str, Node],
) -> dict[str, dict[str, ModelDemand]]:
    """Return the work of the models on each node now."""
    hosted: dict[str, dict[str, ModelDemand]] = {name: {} for name in usable}
    for name, nodes in present.items():
        for node in nodes:
            hosted[node][name] = shared(demands[name], len(nodes))
    return hosted


def _homes(
    single: Mapping[str, ModelDemand],
    present: Mapping[str, Sequence[str]],
    hosted: Mapping[str, dict[str, ModelDemand]],
    usable: Mapping[str, Node],
    *,
    rebalances: bool,
) -> dict[str, str]:
    """Return the node of each model with one replica, as far as decided in this round.

    ``present`` has the nodes with each model now, ``hosted`` the work on each node.
    """
    homes = {name: present[name][0] for name in single if present[name]}
    # Each node adds few models at a time, so the remaining models may wait for a later round.
    most = _ADDITIONS_OF_LOST * len(usable)
    missing = [name for name in single if name not in homes][:most]
    for name in missing:
        able = [node for node in sorted(usable) if name not in usable[node].failed]
        if able:
            home = min(able, key=lambda node: _growth(usable[node], hosted[node], single[name]))
            homes[name] = home
            hosted[home][name] = single[name]
    if rebalances and not missing:
        homes |= _moves(homes, single, hosted, usable)
    return homes


def _moves(
    homes: Mapping[str, str],
    single: Mapping[str, ModelDemand],
    hosted: Mapping[str, Mapping[str, ModelDemand]],
    usable: Mapping[str, Node],
) -> dict[str, str]:
    """Return new homes for models of the most pressed nodes, as far as worth a load.

    In a round a tenth of the nodes give a model away, each to a different node.
    """
    costs = {node: _cost(usable[node], hosted[node].values()) for node in usable}
    left = sorted(costs, key=lambda node: (-costs[node], node))
    of_node: dict[str, list[str]] = {node: [] for node in usable}
    for name, node in homes.items():
        of_node[node].append(name)
    found: dict[str, str] = {}
    for source in left[: math.ceil(len(left) / _SOURCES)]:
        if source not in left or costs[source] < _PRESSED**_POWER:
            continue
        left.remove(source)
        movable = [single[name] for name in of_node[source]]
        move = _best_move(usable[source], movable, left, hosted, usable)
        if move is not None:
            name, target = move
            found[name] = target
            left.remove(target)
    return found


def _best_move(
    source: Node,
    movable: Sequence[ModelDemand],
    others: Sequence[str],
    hosted: Mapping[str, Mapping[str, ModelDemand]],
    usable: Mapping[str, Node],
) -> tuple[str, str] | None:
    """Return a model of ``source`` and the best new node of ``others``, if worth a load.

    Only the models with most work and the least pressed nodes are tried, which bounds the time.
    """
    here = hosted[source.name]
    cost = _cost(source, here.values())
    best, gain = None, _THRESHOLD * cost
    for demand in sorted(movable, key=lambda demand: -demand.load)[:_MOST_TRIED]:
        left = (other for name, other in here.items() if name != demand.model)
        relief = cost - _cost(source, left)
        for target in others[-_MOST_TRIED:]:
            if demand.model in usable[target].failed:
                continue
            found = relief - _growth(usable[target], hosted[target], demand)
            if found > gain:
                best, gain = (demand.model, target), found
    return best


def _cost(node: Node, models: Iterable[ModelDemand]) -> float:
    """Return the cost of a node's pressure: the most pressed nodes count most."""
    demands = {model.model: shared(model, node.num_devices) for model in models}
    report = node.report
    bandwidth = max(report.bandwidth_bytes_per_s, 1.0) * node.num_devices
    device = HomeDevice(0, sum(report.device_bytes), bandwidth, demands)
    return pressure(device, demands) ** _POWER


def _growth(node: Node, models: Mapping[str, ModelDemand], more: ModelDemand) -> float:
    return _cost(node, [*models.values(), more]) - _cost(node, models.values())


def _missing(
    name: str, targets: Iterable[str], having: Mapping[str, FleetModel], usable: Mapping[str, Node]
) -> list[Change]:
    had = any(node in usable for node in having)
    why = "more requests, or less pressure there" if had else "no other node has it"
    return [
        Change("add", name, node, why)
        for node in sorted(targets)
        if node not in having and name not in usable[node].ongoing
    ]


def _superfluous(
    name: str, wanted: Collection[str], having: Mapping[str, FleetModel], nodes: Mapping[str, Node]
) -> list[Change]:
    """Return the removals of a model, if all wanted nodes serve the model.

    With requests left, which under load may be always, the model is retired there.
    """
    if not wanted or not all(nodes[node].serves(name) for node in wanted):
        return []
    return [
        Change(
            "retire" if model.num_live else "remove",
            name,
            node,
            f"served by {', '.join(sorted(wanted))}",
        )
        for node, model in sorted(having.items())
        if node not in wanted and not nodes[node].is_lost and name not in nodes[node].ongoing
    ]


def _cold(
    name: str, targets: Iterable[str], having: Mapping[str, FleetModel], usable: Mapping[str, Node]
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


def _limited(
    found: Sequence[Change], nodes: Mapping[str, Node], lost: Collection[str]
) -> list[Change]:
    """Return the changes without loads for which a node is too busy."""
    num_loads = {name: len(node.ongoing) for name, node in nodes.items()}
    kept = []
    for change in found:
        if change.kind in ("add", "warm"):
            most = _ADDITIONS_OF_LOST if change.model in lost else _ADDITIONS
            if num_loads[change.node] >= most:
                continue
            num_loads[change.node] += 1
        kept.append(change)
    return kept
