"""Times of a large fleet's pure parts, in memory: ``python -m benchmarks.fleet_scale``.

Prints a JSON object for each size: a round of the placement without and with a rebalancing, the
table of the entrances (bytes, pickling and unpickling), its index of names, and the order of nodes
for a request. The loads of the models are drawn with a fixed seed.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Callable
from random import Random

from gpupoold.api.schemas_access import FleetModel, FleetReport
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.fleet.cluster import FleetSpec, FleetTable, Node
from gpupoold.fleet.placement import changes
from gpupoold.fleet.routing import order

SIZES = ((3, 100), (10, 200), (30, 600), (100, 2000))
_GIB = 1 << 30
_ROUNDS = 3


def main() -> None:
    """Measure each number of nodes and models."""
    for num_nodes, num_models in SIZES:
        sizes = {"nodes": num_nodes, "models": num_models}
        print(json.dumps(sizes | measured(*fleet(num_nodes, num_models))))


def measured(nodes: dict[str, Node], specs: dict[str, FleetSpec]) -> dict[str, float]:
    """Return the size of the table, and the least time of each part."""
    table = FleetTable(1, "", tuple(nodes.values()))
    pickled = pickle.dumps(table)
    calls: dict[str, Callable[[], object]] = {
        "place_s": lambda: changes(specs, nodes, rebalances=False),
        "rebalance_s": lambda: changes(specs, nodes, rebalances=True),
        "pickle_s": lambda: pickle.dumps(table),
        "unpickle_s": lambda: pickle.loads(pickled),
        "names_s": table.names,
        "order_s": lambda: order(table, "model-5", b"conversation", {}),
    }
    times_s = {name: round(_least_s(call), 5) for name, call in calls.items()}
    return {"table_bytes": len(pickled)} | times_s


def fleet(num_nodes: int, num_models: int) -> tuple[dict[str, Node], dict[str, FleetSpec]]:
    """Return nodes of two 80 GiB devices with the models spread over them, and all models."""
    rng = Random(1)
    models: dict[str, list[FleetModel]] = {f"node-{number}": [] for number in range(num_nodes)}
    names = [f"model-{number}" for number in range(num_models)]
    for number, name in enumerate(names):
        load, busy_share = 0.2 * rng.random(), 0.3 * rng.random()
        models[f"node-{number % num_nodes}"].append(
            FleetModel(
                name=name,
                names=[name],
                state="ready",
                weights_bytes=16 * _GIB,
                num_live=0,
                first_token_in_s=0.1,
                ttft_s=10.0,
                tbt_s=0.1,
                load=load,
                busy_share=busy_share,
                window_s=7.0,
            )
        )
    nodes = {
        name: Node(name, f"http://{name}", report(each, [80 * _GIB] * 2, 50e9), 0.0)
        for name, each in models.items()
    }
    return nodes, {name: FleetSpec(AddModelRequest(name=name)) for name in names}


def report(
    models: list[FleetModel], device_bytes: list[int], bandwidth_bytes_per_s: float
) -> FleetReport:
    """Return the report of a node that is ready, with these models."""
    return FleetReport(
        secret="",
        http_url="",
        is_ready=True,
        device_bytes=device_bytes,
        bandwidth_bytes_per_s=bandwidth_bytes_per_s,
        models=models,
    )


def _least_s(call: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_ROUNDS):
        began_s = time.perf_counter()
        call()
        times_s.append(time.perf_counter() - began_s)
    return min(times_s)


if __name__ == "__main__":
    main()
