"""Bounds on grammars: what is over one is told by field and bound, what is not passes."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from gpupoold.frontend import grammars
from gpupoold.frontend.body import read_head
from gpupoold.frontend.errors import ApiError
from gpupoold.frontend.grammars import OverBound, check_constraint, group_depth


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as raised:
        read_head(json.dumps({"model": "m", **fields}).encode(), "/v1/completions")
    assert raised.value.status == 400
    return raised.value


def accepted(**fields: Any) -> None:
    assert read_head(json.dumps({"model": "m", **fields}).encode(), "/v1/completions").model == "m"


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth - 1):
        value = {"items": value}
    return value


@pytest.mark.parametrize("field", msgspec.structs.fields(grammars.GrammarFields))
def test_each_field_is_bounded(field: Any) -> None:
    error = refused(**{field.name: {"pattern": "a" * 10_000}})
    assert error.param == f"{field.name}: pattern"
    assert "is 10000 characters long; the bound is 8192" in error.message
    error = refused(**{field.name: "a" * grammars.MAX_BYTES})
    assert error.param == field.name
    assert f"the bound is {grammars.MAX_BYTES}" in error.message


@pytest.mark.parametrize(
    ("fine", "over", "what"),
    [
        (
            nested(grammars.MAX_DEPTH),
            nested(grammars.MAX_DEPTH + 1),
            "nested deeper than 80 levels",
        ),
        ([0] * 19_000, [0] * 20_001, "more than 20000 values"),
        (
            {"properties": dict.fromkeys(map(str, range(5_000)), 0)},
            {"items": {"properties": dict.fromkeys(map(str, range(5_001)), 0)}},
            "has 5001 properties; the bound is 5000",
        ),
        (
            {"a": {"pattern": "(" * 64 + "a" + ")" * 64}},
            {"a": {"pattern": "(" * 65 + "a" + ")" * 65}},
            "has groups nested 65 deep; the bound is 64",
        ),
        (
            {"patternProperties": {"(a)" * 2_000: {}}},
            {"patternProperties": {"(a)" * 3_000: {}}},
            "9000 characters",
        ),
        ({"format": {"regex": "a"}}, {"format": {"regex": "a" * 9_000}}, "9000 characters"),
        ({"grammar": "a" * 60_000}, {"grammar": "a" * 70_000}, "70000 characters"),
        # What only checks like a pattern or a property is not one.
        ({"description": "(" * 9_000, "properties": {"pattern": {}}}, nested(90), "nested"),
    ],
)
def test_bound(fine: Any, over: Any, what: str) -> None:
    accepted(response_format=fine)
    assert what in refused(response_format=over).message


def test_parts_of_structured_outputs() -> None:
    accepted(structured_outputs={"choice": ["a"] * 10_000})
    error = refused(structured_outputs={"choice": ["a"] * 10_001})
    assert error.message == "`structured_outputs.choice` has 10001 choices; the bound is 10000."
    for part in ("json", "structural_tag"):
        accepted(structured_outputs={part: json.dumps({"pattern": "a"})})
        error = refused(structured_outputs={part: json.dumps({"pattern": "a" * 9_000})})
        assert error.param == f"structured_outputs.{part}: pattern"
        assert "nested" in refused(structured_outputs={part: "[" * 100_000}).message


def test_tools() -> None:
    accepted(tools=[{}] * 512)
    assert "has 513 entries; the bound is 512" in refused(tools=[{}] * 513).message


def test_json_that_python_cannot_nest() -> None:
    body = b'{"tools": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(ApiError, match=r"nest|recursion") as raised:
        read_head(body, "/v1/completions")
    assert raised.value.status == 400


@pytest.mark.parametrize(
    "body",
    [
        rb'{"response_format": 1, "response_format": {"pattern": "%s"}}',
        rb'{"\u0072esponse_format": {"pattern": "%s"}}',
        rb'{"response_format": {"p\u0061ttern": "%s"}}',
        rb'{"response_format": {"pattern": "\u0061%s"}}',
    ],
)
def test_other_spellings(body: bytes) -> None:
    with pytest.raises(ApiError, match="the bound is 8192"):
        read_head(body % (b"a" * 8_193), "/v1/completions")


def test_no_grammar_is_no_error() -> None:
    values: list[Any] = [None, 7, "text", [], {}, [[]]]
    for value in values:
        accepted(response_format=value, structured_outputs=value, tools=value, text=value)


@pytest.mark.parametrize(
    ("pattern", "depth"),
    [
        ("", 0),
        ("(a)(b)", 1),
        ("((a)|(?:b(c)))", 3),
        (r"\(\(\(", 0),
        (r"\\(a)", 1),
        ("([)](a))", 2),
        ("([)]" * 5, 5),
        (")))((", 2),
    ],
)
def test_group_depth(pattern: str, depth: int) -> None:
    assert group_depth(pattern) == depth


def test_what_vllm_makes_may_be_longer() -> None:
    """It repeats the tools' schemas."""
    parts = {"json": {"properties": dict.fromkeys(map(str, range(8_000)), 0)}}
    assert json.loads(check_constraint(parts)) == parts
    with pytest.raises(OverBound, match="the bound is 20000"):
        check_constraint({"json": {"properties": dict.fromkeys(map(str, range(20_001)), 0)}})
    with pytest.raises(OverBound, match="characters long; the bound is 1048576"):
        check_constraint({"structural_tag": "a" * (1 << 21)})
