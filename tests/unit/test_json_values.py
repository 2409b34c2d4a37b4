"""Values that no message can hold are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.errors import Refused
from gpupoold.json_values import check_json_text, check_json_value


@pytest.mark.parametrize(
    "value", [0, 2**63 - 1, -(2**63), 0.5, 1e308, "é", True, None, [], {"a": [{"b": 1}]}]
)
def test_values_that_can_be_held(value: Any) -> None:
    check_json_value("x", value)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (2**63, "9223372036854775808"),
        (-(2**63) - 1, "-9223372036854775809"),
        (10**4000, "1000000000"),
        (float("inf"), "inf"),
        (float("nan"), "nan"),
        ("\ud800", r"'\\ud800'"),
        ({"\udfff": 1}, r"'\\udfff'"),
        ({"a": [0, {"b": -float("inf")}]}, "-inf"),
    ],
)
def test_other_values_are_named(value: Any, shown: str) -> None:
    with pytest.raises(Refused, match=shown) as raised:
        check_json_value("top_k", value)
    assert "top_k" in raised.value.message
    assert len(raised.value.message) < 200
    assert raised.value.exit_code == 5


def test_depth_is_bounded() -> None:
    value: Any = 1
    for _ in range(64):
        value = [value]
    with pytest.raises(Refused, match="64 levels"):
        check_json_value("x", value)


@pytest.mark.parametrize("text", ["plain", "{", "7", '{"a": 0.5}', "[1, 2"])
def test_texts_that_can_be_held(text: str) -> None:
    check_json_text("x", text)


@pytest.mark.parametrize(
    "text", ["1e400", "NaN", '{"top_k": 99999999999999999999}', '["\\ud800"]', "\udc80", "[" * 9**5]
)
def test_texts_with_other_values(text: str) -> None:
    with pytest.raises(Refused):
        check_json_text("x", text)
