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
        ({"temperature": None}, {"temperature": 0.2}, {"temperature": 0.2}),
        ({"temperature": 0}, {"temperature": 0.2}, {"temperature": 0}),
        ({"logprobs": False}, {"logprobs": True}, {"logprobs": False}),
        ({}, {"a.b": 1, "a.c": 2}, {"a": {"b": 1, "c": 2}}),
        ({"a": {"b": 3}}, {"a.b": 1, "a.c": 2}, {"a": {"b": 3, "c": 2}}),
        ({"a": None}, {"a.b": 1}, {"a": {"b": 1}}),
        ({"a": {"b": None, "c": 2}}, {"a.b": 1}, {"a": {"b": 1, "c": 2}}),
        ({"a": "text"}, {"a.b": 1}, {"a": "text"}),
    ],
)
def test_fields(body: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(body)
    assert with_defaults(body, defaults) == expected
    assert repr(body) == before


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
CAPS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize(
    ("path", "body", "read"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": None}, None),
        (CHAT, {"max_tokens": None, "max_completion_tokens": None}, None),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_completion_tokens": 5}, 5),
        (f"{CHAT}/batch", {"max_tokens": 5}, 5),
        (COMPLETIONS, {}, None),
        (COMPLETIONS, {"max_tokens": None}, None),
        (COMPLETIONS, {"max_tokens": 5}, 5),
        (RESPONSES, {}, None),
        (RESPONSES, {"max_output_tokens": None}, None),
        (RESPONSES, {"max_output_tokens": 5}, 5),
        (MESSAGES, {"max_tokens": None}, None),
        (MESSAGES, {"max_tokens": 5}, 5),
    ],
)
def test_a_limit_by_any_name(cap: str, path: str, body: dict[str, Any], read: int | None) -> None:
    """The API reads the client's own limit, or else the preset's."""
    filled = with_defaults(body, {cap: 50}, path)
    names = {CHAT: ("max_completion_tokens", "max_tokens"), RESPONSES: ("max_output_tokens",)}.get(
        path.removesuffix("/batch"), ("max_tokens",)
    )
    limits = [filled[name] for name in names if filled.get(name) is not None]
    assert limits == [50 if read is None else read]


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_name_that_the_api_does_not_read_is_no_limit(name: str) -> None:
    filled = with_defaults({name: 1000}, {"max_tokens": 4}, RESPONSES)
    assert filled["max_output_tokens"] == 4


@pytest.mark.parametrize("preset", ["stop", "stop_sequences"])
def test_stop_strings_by_any_name(preset: str) -> None:
    assert with_defaults({}, {preset: ["x"]}, MESSAGES) == {"stop_sequences": ["x"]}
    assert with_defaults({}, {preset: ["x"]}, CHAT) == {"stop": ["x"]}
    assert with_defaults({"stop": ["y"]}, {preset: ["x"]}, CHAT) == {"stop": ["y"]}


@pytest.mark.parametrize(
    ("path", "body", "expected"),
    [
        ("/v1/responses", {"instructions": None}, {"instructions": "Be brief."}),
        ("/v1/responses", {"instructions": "Sing."}, {"instructions": "Sing."}),
        ("/v1/messages", {"system": None}, {"system": "Be brief."}),
        ("/v1/messages/count_tokens", {"system": "Sing."}, {"system": "Sing."}),
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
