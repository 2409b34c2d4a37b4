"""The scheduling core's state as lines of JSON, safe to read from an untrusted file.

A line is an object of the core's object graph: the kind of the object and the content. The first
line is the core. In a content, strings, finite numbers and None are written as JSON values; any
other value is a list that begins with a tag. ``["ref", 3]`` is the object of the fourth line, so
shared and circular references survive. Reading creates containers and instances of the classes
below without calling the classes' code, and checks names and declared types of attributes.
"""

from __future__ import annotations

import math
import types
import typing
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cache
from typing import Any

from gpupoold import domain
from gpupoold.scheduling import core, events, observed, roles, rules, state
from gpupoold.scheduling.policies import aegaeon, baselines, gpupool, planned_turns, rebalancing

_MODULES = (
    *(domain, core, events, observed, roles, rules, state),
    *(aegaeon, baselines, gpupool, planned_turns, rebalancing),
)
_CLASSES: dict[str, type] = {
    name: kind
    for module in _MODULES
    for name, kind in vars(module).items()
    if isinstance(kind, type)
    and kind.__module__ == module.__name__
    and not issubclass(kind, BaseException)
}
_CONTAINERS: dict[str, type] = {kind.__name__: kind for kind in (list, set, deque, dict)}

# Exceptions raised while objects are created and filled from a malformed line.
_MALFORMED = (
    *(ArithmeticError, AttributeError, LookupError),
    *(RecursionError, TypeError, ValueError),
)

Line = tuple[str, list[Any] | dict[str, Any]]


def lines_of(whole: core.Core) -> Iterator[Line]:
    found: list[Any] = [whole]
    numbers = {id(whole): 0}

    def raw(value: Any) -> Any:
        if isinstance(value, Enum):
            return ["enum", type(value).__name__, value.name]
        if isinstance(value, float) and not math.isfinite(value):
            return ["float", str(value)]
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, tuple | frozenset):
            return [type(value).__name__, *map(raw, value)]
        if id(value) not in numbers:
            numbers[id(value)] = len(found)
            found.append(value)
        return ["ref", numbers[id(value)]]

    for one in found:  # ``raw`` appends to ``found``
        kind = type(one).__name__
        if isinstance(one, array):
            yield kind, one.tolist()
        elif isinstance(one, dict):
            yield kind, [[raw(key), raw(value)] for key, value in one.items()]
        elif kind in _CONTAINERS:
            yield kind, [raw(value) for value in one]
        else:
            names = [*_slots(kind), *getattr(one, "__dict__", ())]
            yield kind, {name: raw(getattr(one, name)) for name in names}


def core_of(lines: Sequence[Line]) -> core.Core:
    """Return the core described by ``lines``. Raises BadLine: the lines are not a core's state."""
    made: list[Any] = []
    for number, (kind, _) in enumerate(lines):
        with _errors_of(number):
            made.append(_new(kind))
    for number, (_, content) in enumerate(lines):
        with _errors_of(number):
            _fill(made[number], content, made)
    for number, one in enumerate(made):
        with _errors_of(number):
            _check_types(one)
    if not made or not isinstance(made[0], core.Core):
        raise BadLine(0, "the first object is not a core")
    return made[0]


class BadLine(Exception):
    """An error in a line; ``number`` counts from 0."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(number, problem)
        self.number = number
        self.problem = problem


@contextmanager
def _errors_of(number: int) -> Iterator[None]:
    try:
        yield
    except _MALFORMED as error:
        raise BadLine(number, str(error)) from None


def _new(kind: str) -> Any:
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]()
    if kind == "array":
        return array("q")
    found = _CLASSES.get(kind)
    if found is None or issubclass(found, Enum | tuple):
        raise TypeError(f"no kind of object is named {kind!r}")
    return object.__new__(found)


def _fill(one: Any, content: list[Any] | dict[str, Any], made: Sequence[Any]) -> None:
    kind = type(one).__name__
    if isinstance(content, dict):
        slots = _slots(kind)
        if kind not in _CLASSES or not content.keys() >= set(slots):
            raise TypeError(f"{', '.join(content)} are not the attributes of {kind}")
        for name, value in content.items():
            if name not in slots and hasattr(type(one), name):
                raise TypeError(f"{name} is not an attribute of a {kind}")
            object.__setattr__(one, name, _value(value, made))
    elif kind in _CLASSES:
        raise TypeError(f"a {kind} has attributes, not elements")
    elif isinstance(one, dict):
        one.update((_value(key, made), _value(value, made)) for key, value in content)
    elif isinstance(one, set):
        one.update(_value(value, made) for value in content)
    else:
        one.extend(_value(value, made) for value in content)


def _value(raw: Any, made: Sequence[Any]) -> Any:
    if not isinstance(raw, list | dict):
        return raw
    match raw:
        case ["ref", int(number)] if 0 <= number < len(made):
            return made[number]
        case ["float", ("inf" | "-inf" | "nan") as text]:
            return float(text)
        case ["enum", str(kind), str(name)] if issubclass(
            found := _CLASSES.get(kind, object), Enum
        ):
            return found[name]
        case ["tuple", *items]:
            return tuple(_value(item, made) for item in items)
        case ["frozenset", *items]:
            return frozenset(_value(item, made) for item in items)
        case [str(kind), *items] if issubclass(found := _CLASSES.get(kind, object), tuple):
            value: Any = found(*(_value(item, made) for item in items))
            _check_types(value)
            return value
    raise ValueError(f"{str(raw)[:100]} is not a value")


def _check_types(one: Any) -> None:
    """Raise TypeError if an attribute is not of the type declared by the class."""
    for name, hint in _hints(type(one).__name__).items():
        if not _fits(getattr(one, name), hint):
            raise TypeError(f"{name} of a {type(one).__name__} is not {hint}")


def _fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of a declared type; elements of containers are not checked."""
    if isinstance(hint, types.UnionType):
        return any(_fits(value, arg) for arg in typing.get_args(hint))
    if hint is float:
        return isinstance(value, int | float)
    return isinstance(value, typing.get_origin(hint) or hint)


@cache
def _hints(kind: str) -> dict[str, Any]:
    """Return the declared types of the attributes of a dataclass or named tuple, by name."""
    names = (*_slots(kind), *getattr(_CLASSES.get(kind), "_fields", ()))
    hints = typing.get_type_hints(_CLASSES[kind]) if names else {}
    return {name: hint for name, hint in hints.items() if name in names}


@cache
def _slots(kind: str) -> tuple[str, ...]:
    mro = _CLASSES[kind].__mro__ if kind in _CLASSES else ()
    return tuple(name for base in mro for name in vars(base).get("__slots__", ()))
