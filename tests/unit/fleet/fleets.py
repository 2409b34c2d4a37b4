"""Nodes and models of fleets for tests."""

from __future__ import annotations

from typing import Any

from gpupoold.api.schemas_access import FleetModel, FleetReport
from gpupoold.api.schemas_models import AddModelRequest
from gpupoold.fleet.cluster import FleetSpec, Node

GIB = 1 << 30


def model(name: str, **changes: Any) -> FleetModel:
    fields: dict[str, Any] = {
        "name": name,
        "names": [name],
        "state": "ready",
        "weights_bytes": 16 * GIB,
        "num_live": 0,
        "first_token_in_s": 0.1,
        "ttft_s": 10.0,
        "tbt_s": 0.1,
        "window_s": 7.0,
    }
    return FleetModel(**fields | changes)


def report(*models: FleetModel, **changes: Any) -> FleetReport:
    fields: dict[str, Any] = {
        "secret": "ab" * 32,
        "http_url": "http://10.0.0.1:8000",
        "is_ready": True,
        "device_bytes": [80 * GIB] * 2,
        "bandwidth_bytes_per_s": 50e9,
        "models": list(models),
    }
    return FleetReport(**fields | changes)


def node(name: str, *models: FleetModel, **changes: Any) -> Node:
    return Node(name, f"http://{name}:8000", report(*models), 0.0, **changes)


def nodes(*given: Node) -> dict[str, Node]:
    return {one.name: one for one in given}


def spec(name: str, least_replicas: int = 1) -> FleetSpec:
    return FleetSpec(AddModelRequest(name=name, source=f"/models/{name}"), least_replicas)


def specs(*given: FleetSpec) -> dict[str, FleetSpec]:
    return {one.name: one for one in given}
