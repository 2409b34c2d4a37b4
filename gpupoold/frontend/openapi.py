"""The OpenAPI description of the public HTTP surface. Pure.

Contains the served part of a model's API, and gpupool's own paths.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

from gpupoold import __version__
from gpupoold.frontend.batches import openapi as batches

_INFO = {
    "title": "gpupool",
    "version": __version__,
    "description": "The model of a request is its `model`, by name or alias.",
}
# The summary of each path, and what 503 means, empty without.
_OWN_PATHS = {
    "/": ("Where the API is.", ""),
    "/health": ("The server runs.", ""),
    "/ready": ("Requests can be served; 503 until then.", "Not yet."),
    "/version": ("gpupool's version.", ""),
    "/metrics": ("Counters and gauges for Prometheus, as text.", "The daemon does not answer."),
    "/v1/models": ("The models, with their states.", "The server is starting."),
    "/v1/models/{model}": ("One model, by name or alias.", "The server is starting."),
}
# Responses that any request for a model may get, before or after the model's API.
_REFUSALS = tuple(map(HTTPStatus, (400, 401, 403, 404, 408, 413, 415, 429, 503)))
_REF_PREFIX = "#/components/schemas/"


def describe(
    engines: Iterable[Mapping[str, Any]], is_served: Callable[[str], bool]
) -> dict[str, Any]:
    """Return the OpenAPI description of this frontend.

    Args:
        engines: those of the models' APIs, one per kind; empty while no model is mounted.
        is_served: whether a path of a model's API is within reach.
    """
    paths: dict[str, Any] = dict(_own_paths()) | batches.PATHS
    schemas: dict[str, Any] = dict(batches.SCHEMAS)
    version = "3.1.0"
    for engine in engines:
        version = engine.get("openapi", version)
        schemas |= engine.get("components", {}).get("schemas", {})
        for path, operations in engine["paths"].items():
            if is_served(path):
                paths[path] = {
                    method: _with_refusals(operation) for method, operation in operations.items()
                }
    return {
        "openapi": version,
        "info": _INFO,
        "paths": paths,
        "components": {"schemas": {name: schemas[name] for name in sorted(_used(paths, schemas))}},
    }


def _own_paths() -> Iterator[tuple[str, Any]]:
    for path, (summary, unavailable) in _OWN_PATHS.items():
        operation: dict[str, Any] = {"summary": summary, "responses": {"200": _json("Yes.")}}
        if path == "/metrics":
            text = {"description": "The count.", "content": {"text/plain": {}}}
            operation["responses"] = {"200": text}
        if unavailable:
            operation["responses"]["503"] = _json(unavailable)
        if path.endswith("{model}"):
            operation["responses"]["404"] = _json("There is no such model.")
            parameter = {"name": "model", "in": "path", "required": True}
            operation["parameters"] = [parameter | {"schema": {"type": "string"}}]
        yield path, {"get": operation}


def _json(description: str) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": {}}}}


def _with_refusals(operation: Mapping[str, Any]) -> dict[str, Any]:
    described = copy.deepcopy(dict(operation))
    for status in _REFUSALS:
        described["responses"].setdefault(str(int(status)), _json(status.phrase))
    return described


def _used(place: Any, schemas: Mapping[str, Any]) -> set[str]:
    """Return the names of all schemas that ``place`` refers to, directly or indirectly."""
    used: set[str] = set()
    left = [place]
    while left:
        one = left.pop()
        if isinstance(one, Mapping):
            name = str(one.get("$ref", "")).removeprefix(_REF_PREFIX)
            if name in schemas and name not in used:
                used.add(name)
                left.append(schemas[name])
            left.extend(one.values())
        elif isinstance(one, list):
            left.extend(one)
    return used
