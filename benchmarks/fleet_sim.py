"""A large fleet in the simulator: ``python -m benchmarks.fleet_sim``.

The models of all nodes have requests at rates by Zipf's law. Each node is a box of the simulator
with the default policy. The models are placed blindly first, in turn; the nodes then report the
work as daemons do, and the fleet's placement changes nodes until nothing is left to change. Prints
a JSON object for the attainment, the nodes' attainments and the largest rate of one node, before
and after, and the number of changes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from benchmarks.fleet_scale import report
from benchmarks.sim_devices import CappedLengths
from gpupoold.api.schemas_access import FleetModel
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.domain import Targets
from gpupoold.fleet.cluster import FleetSpec, Node
from gpupoold.fleet.placement import changes
from gpupoold.scheduling.policies.planned_turns import Tuning
from gpupoold.scheduling.policies.rebalancing import expected_work
from gpupoold.scheduling.pressure import ModelDemand
from gpupoold.sim.boxes import DEFAULT_SHAPES, Box, SimModel, box_models, parse_box
from gpupoold.sim.device import BoxDevice
from gpupoold.sim.engine import Simulation
from gpupoold.sim.host import host_memory
from gpupoold.sim.metrics import RequestResult, summarise
from gpupoold.sim.policies import make_policy
from gpupoold.sim.workloads import SimRequest, poisson_workload

_LEAD_SHARE = Tuning().lead_share
_MAX_ROUNDS = 1000

Placement = dict[str, list[str]]
"""The nodes of each model."""


class SimulatedFleet:
    """Nodes of one kind of box, and models with their rates."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.box: Box = parse_box(args.devices)
        targets = Targets(args.ttft, args.tbt)
        self.models: dict[str, SimModel] = box_models(
            self.box, args.models, targets, DEFAULT_SHAPES
        )
        self.nodes = [f"node-{number}" for number in range(args.nodes)]
        weights = [1 / (rank + 1) ** args.skew for rank in range(args.models)]
        rates = {
            name: args.rps * weight / sum(weights)
            for name, weight in zip(self.models, weights, strict=True)
        }
        lengths = CappedLengths(2048, args.max_output)
        self.requests = poisson_workload(rates, args.duration, lengths, args.seed)
        self.specs = {name: FleetSpec(AddModelRequest(name=name)) for name in self.models}

    def blind(self) -> Placement:
        """Return the models placed in turn, in a random order."""
        names = list(self.models)
        Random(0).shuffle(names)
        return {name: [self.nodes[n % len(self.nodes)]] for n, name in enumerate(names)}

    def run(self, placement: Placement) -> tuple[dict[str, Any], dict[str, Node]]:
        """Simulate all nodes; return the figures, and the nodes with their reports."""
        queues: defaultdict[str, list[SimRequest]] = defaultdict(list)
        turns: defaultdict[str, int] = defaultdict(int)
        for request in self.requests:
            homes = placement[request.model]
            queues[homes[turns[request.model] % len(homes)]].append(request)
            turns[request.model] += 1
        results: list[RequestResult] = []
        shares, nodes = [], {}
        for node in self.nodes:
            names = [name for name, homes in placement.items() if node in homes]
            found, nodes[node] = self._run_node(node, names, queues[node])
            results += found
            shares.append(_attainment(found))
        figures = {
            "attainment": round(_attainment(results), 4),
            "worst_node": round(min(shares), 4),
            "nodes_below_99_percent": sum(share < 0.99 for share in shares),
            "largest_node_rps": round(max(map(len, queues.values())) / self.requests[-1].arrival_s),
        }
        return figures, nodes

    def _run_node(
        self, node: str, names: Sequence[str], requests: Sequence[SimRequest]
    ) -> tuple[Sequence[RequestResult], Node]:
        host = host_memory(self.box)
        simulation = Simulation(
            {name: self.models[name] for name in names},
            make_policy("gpupool"),
            [BoxDevice(self.box.device_bytes, kv_host_bytes=host.kv_bytes_per_gpu)]
            * self.box.num_devices,
            host=host,
        )
        results = simulation.run(requests, self.requests[-1].arrival_s + 120.0).results
        return results, self._reported(node, names, simulation)

    def _reported(self, name: str, names: Sequence[str], simulation: Simulation) -> Node:
        """Return a node with the report of a daemon after these requests."""
        state, now_s = simulation.core.state, self.requests[-1].arrival_s
        rates = state.arrivals.lasting.rates_rps(now_s)
        found = []
        for model_name in names:
            model = state.models[model_name]
            work = expected_work(model, rates.get(model_name, {}), model.speed(), _LEAD_SHARE)
            found.append(_fleet_model(self.models[model_name], work))
        device_bytes = [self.box.device_bytes] * self.box.num_devices
        bandwidth = state.devices[0].bandwidth_bytes_per_s
        return Node(name, "", report(found, device_bytes, bandwidth), 0.0)


def _fleet_model(model: SimModel, work: ModelDemand) -> FleetModel:
    return FleetModel(
        name=model.name,
        names=[model.name],
        state="ready",
        weights_bytes=model.weight_bytes,
        num_live=0,
        first_token_in_s=0.1,
        ttft_s=model.targets.ttft_s,
        tbt_s=model.targets.tbt_s,
        load=work.load,
        busy_share=work.busy_share,
        kv_bytes=work.kv_bytes,
        window_s=_LEAD_SHARE * model.targets.ttft_s,
    )


def placed(fleet: SimulatedFleet, nodes: Mapping[str, Node]) -> tuple[Placement, int, float]:
    """Let the fleet change the nodes; return the placement, the changes and seconds of a round."""
    work = {one.name: one for node in nodes.values() for one in node.report.models}
    homes: Placement = {one: [] for one in work}
    for node in nodes.values():
        for model in node.report.models:
            homes[model.name].append(node.name)
    num_changes, num_rounds, round_s = 0, 0, 0.0
    while num_rounds < _MAX_ROUNDS:
        began_s = time.monotonic()
        due = changes(fleet.specs, _nodes_with(homes, work, nodes), rebalances=True)
        round_s = max(round_s, time.monotonic() - began_s)
        if not due:
            break
        num_rounds += 1
        num_changes += len(due)
        for one in due:
            if one.kind == "add":
                homes[one.model].append(one.node)
            else:
                homes[one.model].remove(one.node)
    return homes, num_changes, round_s


def _nodes_with(
    homes: Placement, work: Mapping[str, FleetModel], nodes: Mapping[str, Node]
) -> dict[str, Node]:
    """Return the nodes with the models of a placement, whose replicas share the work."""
    models: defaultdict[str, list[FleetModel]] = defaultdict(list)
    for name, there in homes.items():
        one = work[name]
        share = {key: getattr(one, key) / len(there) for key in ("load", "busy_share", "kv_bytes")}
        for node in there:
            models[node].append(one.model_copy(update=share))
    return {
        name: replace(node, report=node.report.model_copy(update={"models": models[name]}))
        for name, node in nodes.items()
    }


def _attainment(results: Sequence[RequestResult]) -> float:
    if not results:
        return 1.0
    return summarise(results).overall.attainment or 0.0


def main() -> int:
    """Simulate before and after."""
    args = _parse()
    fleet = SimulatedFleet(args)
    print(json.dumps({"requests": len(fleet.requests), **vars(args)}), flush=True)
    blind = fleet.blind()
    before, nodes = fleet.run(blind)
    print(json.dumps({"placement": "blind", **before}), flush=True)
    placement, num_changes, round_s = placed(fleet, nodes)
    after, _ = fleet.run(placement)
    shown = {"changes": num_changes, "round_s": round(round_s, 3)}
    shown["replicas"] = sum(map(len, placement.values())) - len(placement)
    print(json.dumps({"placement": "fleet", **after, **shown}), flush=True)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.fleet_sim", description=__doc__)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--devices", default="8xH800", help="of each node")
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--rps", type=float, default=1600.0, help="of all models together")
    parser.add_argument("--skew", type=float, default=0.8, help="exponent of Zipf's law")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--max-output", type=int, default=256, help="cap on answer tokens")
    parser.add_argument("--ttft", type=float, default=10.0)
    parser.add_argument("--tbt", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
