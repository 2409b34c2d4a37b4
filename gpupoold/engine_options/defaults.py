"""Defaults of a preset, applied to the bodies of requests. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SYSTEM_PROMPT = "system_prompt"
"""The default that is no field of a request: a system message for conversations without one."""
LIMITS = ("max_completion_tokens", "max_output_tokens", "max_tokens")
"""The names that the APIs give the limit of an answer's tokens."""
_SYSTEM_ROLES = ("system", "developer")
_STOPS = ("stop", "stop_sequences")
_MESSAGES, _RESPONSES, _CHAT = "/v1/messages", "/v1/responses", "/v1/chat/completions"
# The names of a field in each API by the beginning of its path: only these are read, the first
# beats the others.
_NAMES: Mapping[tuple[str, ...], Mapping[str, tuple[str, ...]]] = {
    LIMITS: {
        _CHAT: ("max_completion_tokens", "max_tokens"),
        _RESPONSES: ("max_output_tokens",),
        _MESSAGES: ("max_tokens",),
        "/v1/completions": ("max_tokens",),
    },
    _STOPS: {
        _CHAT: ("stop",),
        _RESPONSES: ("stop",),
        _MESSAGES: ("stop_sequences",),
        "/v1/completions": ("stop",),
    },
}


def with_defaults(
    body: Mapping[str, Any], defaults: Mapping[str, Any], path: str = ""
) -> dict[str, Any]:
    """Return the body of a request to ``path`` with defaults for its missing fields.

    A field of None is missing, and so is a field that the request has only by a name that the API
    does not read. A dotted name is a key of an object; an object of the request keeps its other
    keys.
    """
    merged = dict(body)
    for name, value in defaults.items():
        if name == SYSTEM_PROMPT:
            _set_system_prompt(merged, value, path)
        else:
            names = _names_in(path, name)
            if all(merged.get(name) is None for name in names[1:]):
                _set(merged, names[0].split("."), value)
    return merged


def _names_in(path: str, name: str) -> tuple[str, ...]:
    """Return the names of a field in the API of ``path``: the name to set, then its synonyms."""
    for synonyms, by_path in _NAMES.items():
        if name in synonyms:
            read = next((read for api, read in by_path.items() if path.startswith(api)), (name,))
            first = name if name in read else read[0]
            return (first, *(file for file in read if file != first))
    return (name,)


def _set(fields: dict[str, Any], keys: list[str], value: Any) -> None:
    first, *others = keys
    inner = fields.get(first)
    if not others:
        fields[first] = value if inner is None else inner
        return
    if inner is None:
        inner = {}
    if isinstance(inner, dict):
        fields[first] = inner = dict(inner)
        _set(inner, others, value)


def _set_system_prompt(body: dict[str, Any], text: str, path: str) -> None:
    if path.startswith(_MESSAGES):
        _set(body, ["system"], text)
    elif path.startswith(_RESPONSES):
        _set(body, ["instructions"], text)
    elif isinstance(messages := body.get("messages"), list):
        if messages and all(isinstance(message, list) for message in messages):
            body["messages"] = [_with_system_message(message, text) for message in messages]
        else:
            body["messages"] = _with_system_message(messages, text)


def _with_system_message(messages: list[Any], text: str) -> list[Any]:
    has_one = any(
        isinstance(message, dict) and message.get("role") in _SYSTEM_ROLES for message in messages
    )
    return messages if has_one else [{"role": "system", "content": text}, *messages]
