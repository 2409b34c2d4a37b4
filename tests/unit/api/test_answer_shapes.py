"""The answers of the admin API, which `--json` prints, keep their fields, order and types.

`python -m tests.unit.api.test_answer_shapes` records the shapes anew, for a change that users
are told of in CHANGELOG.md.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from pydantic import TypeAdapter

from gpupoold.api.client import AdminClient
from gpupoold.doctor.checks import Check

_RECORDED = Path(__file__).with_name("answer_shapes.json")


def _answers() -> Iterator[tuple[str, Any]]:
    """Yield the name and the type of each answer; a stream has the type of a line."""
    for name, method in inspect.getmembers(AdminClient, inspect.isfunction):
        if name.startswith("_") or name == "close":
            continue
        answer = get_type_hints(method)["return"]
        yield name, get_args(answer)[0] if get_origin(answer) is Iterator else answer
    yield "doctor", Check


def _shape(schema: dict[str, Any], defs: dict[str, Any]) -> Any:
    """Return fields and types of a JSON schema, in the order of the fields, without class names."""
    if "$ref" in schema:
        return _shape(defs[schema["$ref"].rpartition("/")[2]], defs)
    if "properties" in schema:
        return {name: _shape(one, defs) for name, one in schema["properties"].items()}
    if "anyOf" in schema:
        kinds = [_shape(one, defs) for one in schema["anyOf"]]
        return " | ".join(kinds) if all(isinstance(one, str) for one in kinds) else kinds
    if "enum" in schema or "const" in schema:
        return " | ".join(sorted(map(str, schema.get("enum") or [schema["const"]])))
    if schema.get("type") == "array":
        return [_shape(one, defs) for one in schema.get("prefixItems") or [schema["items"]]]
    if isinstance(schema.get("additionalProperties"), dict):
        return {"any name": _shape(schema["additionalProperties"], defs)}
    return schema.get("type", "anything")


def _recorded() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_RECORDED.read_text())
    return found


def _shape_of(answer: Any) -> Any:
    schema = TypeAdapter(answer).json_schema(mode="serialization")
    return _shape(schema, schema.get("$defs", {}))


def _text(shape: Any) -> str:
    """Return a text that has the order of the fields."""
    return json.dumps(shape, indent=1)


@pytest.mark.parametrize(("name", "answer"), _answers())
def test_an_answer_has_the_recorded_shape(name: str, answer: Any) -> None:
    assert _text(_shape_of(answer)) == _text(_recorded().get(name))


def test_each_recorded_answer_is_there() -> None:
    assert {name for name, _ in _answers()} == _recorded().keys()


if __name__ == "__main__":
    _RECORDED.write_text(_text({name: _shape_of(answer) for name, answer in _answers()}) + "\n")
