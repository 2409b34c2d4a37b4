"""Defaults of presets in the bodies of requests."""

from __future__ import annotations

from typing import Any

import pytest

from gpupoold.engine_options.defaults import with_defaults

USER = {"role": "user", "content": "hello"}
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("body", "defaults", "expected"),
    [
        ({}, {"temperature": 0.2}, {"temperature": 0.2}),
        ({"temperature": 1}, {"temperature": 0.2}, {"temperature": 1}),
        ({"temperature": None}, {"temperature": 0.2}, {"temperature": None}),
        ({}, {"a.b": 1, "a.c": 2}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 3}}, {"a.b": 1, "a.c": 2}, {"a": {"b": 3, "c": 2}}),
        ({"a": None}, {"a.b": 1}, {"a": {"b": 1}}),
        ({"a": "text"}, {"a.b": 1}, {"a": "text"}),
    ],
)
def test_fields(body: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(body)
    assert with_defaults(body, defaults) == expected
    assert repr(body) == before


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/chat/completions", {"messages": [USER]}, {"messages": [SYSTEM, USER]}),
        ("/v1/chat/completions", {"messages": [SYSTEM, USER]}, {"messages": [SYSTEM, USER]}),
        ("/v1/chat/completions", {"messages": "?"}, {"messages": "?"}),
        ("/v1/chat/completions/batch", {"messages": [[USER]]}, {"messages": [[SYSTEM, USER]]}),
        ("/v1/responses", {"input": "x"}, {"input": "x", "instructions": "Be brief."}),
        ("/v1/messages", {"messages": [USER]}, {"messages": [USER], "system": "Be brief."}),
        ("/v1/completions", {"prompt": "x"}, {"prompt": "x"}),
    ],
)
def test_a_system_prompt(path: str, body: dict[str, Any], expected: dict[str, Any]) -> None:
    assert with_defaults(body, {"system_prompt": "Be brief."}, path) == expected
