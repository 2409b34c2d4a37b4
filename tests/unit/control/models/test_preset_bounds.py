"""Names and sizes of a preset's defaults."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.control.models.further_names import MAX_DEFAULTS, check_defaults
from gpupoold.errors import Refused, UsageError


def test_good_defaults() -> None:
    check_defaults({"temperature": 0.2, "chat_template_kwargs.enable_thinking": True})
    check_defaults(
        {"system_prompt": "a {name} {{ 7 * 7 }} \x1b[31m \x00"}
    )  # text, never a template


@pytest.mark.parametrize(
    ("defaults", "message"),
    [
        ({f"a{i}": 1 for i in range(MAX_DEFAULTS + 1)}, "more than 64"),
        ({"a b": 1}, "not the name"),
        ({".a": 1}, "not the name"),
        ({"a.b.c.d.e.f": 1}, "not the name"),
        ({"messages": []}, "cannot have a default"),
        ({"model.x": 1}, "cannot have a default"),
        ({"a": {}, "a.b": 1}, "as a whole and by key"),
        ({"temperature": None}, "the default null"),
        ({"system_prompt": ["x"]}, "is no text"),
        ({"system_prompt": "x" * 70_000}, "characters"),
    ],
)
def test_wrong_defaults(defaults: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_defaults(defaults)


@pytest.mark.parametrize("value", [99999999999999999999, float("inf"), float("nan"), ["\ud800"]])
def test_values_that_no_process_can_hold(value: object) -> None:
    with pytest.raises(Refused, match="top_k has the value"):
        check_defaults({"top_k": value})
