"""Defaults of a preset, applied to the bodies of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYSTEM_PROMPT = "system_prompt"
"""The default that is no field of a request: a system message for conversations without one."""
_SYSTEM_ROLES = ("system", "developer")


def with_defaults(
    body: Mapping[str, Any], defaults: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return the body of a request to ``path`` with defaults for its missing fields.

    A dotted name is a key of an object; an object of the request keeps its other keys.
    """
    merged = dict(body)
    for name, value in defaults.items():
        if name == SYSTEM_PROMPT:
            _set_system_prompt(merged, value, path)
        else:
            _set(merged, name.split("."), value)
    return merged


def _set(fields: dict[str, Any], keys: list[str], value: Any) -> None:
    first, *others = keys
    if not others:
        fields.setdefault(first, value)
        return
    inner = fields.get(first)
    if inner is None:
        inner = {}
    if isinstance(inner, dict):
        fields[first] = inner = dict(inner)
        _set(inner, others, value)


def _set_system_prompt(body: dict[str, Any], text: str, path: str) -> None:
    if path.startswith("/v1/messages"):
        body.setdefault("system", text)
    elif path.startswith("/v1/responses"):
        body.setdefault("instructions", text)
    elif isinstance(messages := body.get("messages"), list):
        if messages and all(isinstance(one, list) for one in messages):
            body["messages"] = [_with_system_message(one, text) for one in messages]
        else:
            body["messages"] = _with_system_message(messages, text)


def _with_system_message(messages: list[Any], text: str) -> list[Any]:
    has_one = any(isinstance(one, dict) and one.get("role") in _SYSTEM_ROLES for one in messages)
    return messages if has_one else [{"role": "system", "content": text}, *messages]
