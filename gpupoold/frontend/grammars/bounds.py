"""Bounds on the grammars of requests: schemas, patterns, choices, tools.

No function calls a grammar library. Every check takes time linear in the text and does not recurse,
so that the event loop can run the check.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

MAX_BYTES = 256 << 10
"""Limit of one field's text in bytes."""
MAX_VALUES = 20_000
"""Limit of JSON values in one field, counted at all levels."""
MAX_PROPERTIES = 5_000
"""Limit of entries of all ``properties`` and ``patternProperties`` in one field."""
MAX_DEPTH = 80
"""Limit of JSON levels. vLLM accepts 64 in a schema, and 16 more around it in a structural tag."""
MAX_PATTERN_CHARS = 8_192
MAX_PATTERN_DEPTH = 64
"""Limit of group levels in one regular expression."""
MAX_CHOICES = 10_000
MAX_TOOLS = 512
MAX_EBNF_BYTES = 64 << 10

# Keys whose string value is a regular expression, in schemas and structural tags.
_PATTERN_KEYS = frozenset({"pattern", "regex", "whitespace_pattern"})
_EBNF_KEYS = frozenset({"grammar", "ebnf"})
_PROPERTY_KEYS = frozenset({"properties", "patternProperties"})
_CHECKED_KEYS = _PATTERN_KEYS | _EBNF_KEYS | _PROPERTY_KEYS
_NESTED_JSON_KEYS = ("json", "structural_tag")
# vLLM's grammar for tools repeats parts of the tools' schemas: factor for all bounds.
_DERIVED = 4


class OverBound(ValueError):
    """A grammar exceeds a bound; ``field`` names its field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"`{field}` {message}")
        self.field = field


class GrammarFields(msgspec.Struct):
    """The fields of a request's body, of all APIs, that define grammars; not yet parsed."""

    response_format: msgspec.Raw = msgspec.Raw()
    structured_outputs: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    output_config: msgspec.Raw = msgspec.Raw()
    output_format: msgspec.Raw = msgspec.Raw()


def check_fields(fields: GrammarFields) -> None:
    """Check a body's fields before any other reader.

    Raises:
        OverBound: a field exceeds a bound.
    """
    for name in GrammarFields.__struct_fields__:
        raw: msgspec.Raw = getattr(fields, name)
        num_bytes = len(memoryview(raw))
        if not num_bytes:
            continue
        if num_bytes > MAX_BYTES:
            raise _over(name, "is", num_bytes, "bytes long", MAX_BYTES)
        value = _parsed(name, bytes(raw))
        _check_value(name, value)
        if name == "structured_outputs" and isinstance(value, dict):
            _check_parts(name, value)
        if name == "tools" and isinstance(value, list) and len(value) > MAX_TOOLS:
            raise _over(name, "has", len(value), "entries", MAX_TOOLS)


def check_constraint(parts: dict[str, Any]) -> bytes:
    """Check vLLM's parsed fields of a request, named as in ``structured_outputs``.

    Returns the parts as JSON.

    Raises:
        OverBound: a part exceeds a bound.
    """
    field = "structured_outputs"
    _check_value(field, parts, _DERIVED)
    _check_parts(field, parts, _DERIVED)
    content = json.dumps(parts).encode()
    if len(content) > _DERIVED * MAX_BYTES:
        raise _over(field, "is", len(content), "bytes long", _DERIVED * MAX_BYTES)
    return content


def _check_parts(field: str, parts: dict[str, Any], factor: int = 1) -> None:
    choice = parts.get("choice")
    if isinstance(choice, list) and len(choice) > MAX_CHOICES:
        raise _over(f"{field}.choice", "has", len(choice), "choices", MAX_CHOICES)
    for key in _NESTED_JSON_KEYS:
        text = parts.get(key)
        if isinstance(text, str):
            name = f"{field}.{key}"
            if len(text) > factor * MAX_BYTES:
                raise _over(name, "is", len(text), "characters long", factor * MAX_BYTES)
            _check_value(name, _parsed(name, text), factor)


def _parsed(field: str, text: str | bytes) -> Any:
    """Return the JSON value, None for text that is no JSON, which vLLM refuses."""
    try:
        return json.loads(text)
    except RecursionError:
        raise OverBound(field, f"is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError:
        return None


def _check_value(field: str, value: Any, factor: int = 1) -> None:
    max_values, max_properties = factor * MAX_VALUES, factor * MAX_PROPERTIES
    num_values = num_properties = 0
    level = [value]
    depth = 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise OverBound(field, f"is nested deeper than {MAX_DEPTH} levels")
        num_values += len(level)
        if num_values > max_values:
            raise OverBound(field, f"has more than {max_values} values")
        children: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                num_properties += 0 if _CHECKED_KEYS.isdisjoint(one) else _check_object(field, one)
                children += one.values()
            elif isinstance(one, list):
                children += one
        if num_properties > max_properties:
            raise _over(field, "has", num_properties, "properties", max_properties)
        level = children


def _check_object(field: str, value: dict[str, Any]) -> int:
    """Check the strings in one object of a schema; return its number of declared properties."""
    for key in _PATTERN_KEYS & value.keys():
        if isinstance(value[key], str):
            _check_pattern(f"{field}: {key}", value[key])
    for key in _EBNF_KEYS & value.keys():
        text = value[key]
        if isinstance(text, str) and len(text) > MAX_EBNF_BYTES:
            raise _over(f"{field}: {key}", "is", len(text), "characters long", MAX_EBNF_BYTES)
    declared = value.get("patternProperties")
    if isinstance(declared, dict):
        for pattern in declared:
            _check_pattern(f"{field}: patternProperties", pattern)
    return sum(
        len(value[key]) for key in _PROPERTY_KEYS & value.keys() if isinstance(value[key], dict)
    )


def _check_pattern(field: str, pattern: str) -> None:
    if len(pattern) > MAX_PATTERN_CHARS:
        raise _over(field, "is", len(pattern), "characters long", MAX_PATTERN_CHARS)
    depth = group_depth(pattern)
    if depth > MAX_PATTERN_DEPTH:
        raise _over(field, "has groups nested", depth, "deep", MAX_PATTERN_DEPTH)


def group_depth(pattern: str) -> int:
    """Return the group levels in a regular expression, or more.

    Parsers disagree on the end of a character class. So an opening parenthesis always counts, and a
    closing one only outside of classes.
    """
    depth = deepest = 0
    is_escaped = is_in_class = False
    for character in pattern:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif character == "(":
            depth += 1
            deepest = max(deepest, depth)
        elif character == "[":
            is_in_class = True
        elif character == "]":
            is_in_class = False
        elif character == ")" and not is_in_class:
            depth = max(0, depth - 1)
    return deepest


def _over(field: str, verb: str, number: int, unit: str, bound: int) -> OverBound:
    return OverBound(field, f"{verb} {number} {unit}; the bound is {bound}")
