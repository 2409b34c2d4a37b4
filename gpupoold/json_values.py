"""Checks of JSON values that users choose freely, such as the defaults of a preset. Pure."""

from __future__ import annotations

import json
import math
from typing import Any

from gpupoold.errors import Refused

_LEAST, _MOST = -(2**63), 2**63 - 1
_MAX_DEPTH = 64
_SHOWN_CHARACTERS = 80
_FLATTER = "use fewer levels"


def check_json_value(name: str, value: Any) -> None:
    """Check that every process can hold a value: no message has other numbers or texts.

    Raises Refused: the value, or a value in it, is a number beyond 64 bits, no finite number, or a
    text with half of a surrogate pair; or it is nested too deep.
    """
    waiting = [(value, 1)]
    while waiting:
        one, depth = waiting.pop()
        if depth > _MAX_DEPTH:
            raise Refused(f"{name} is nested more than {_MAX_DEPTH} levels deep", _FLATTER)
        if reason := _why_not(one):
            shown = ascii(one) if isinstance(one, str) else str(one)
            raise Refused(
                f"{name} has the value {shown[:_SHOWN_CHARACTERS]}, {reason}", "change it"
            )
        if isinstance(one, dict):
            waiting += [(inner, depth + 1) for pair in one.items() for inner in pair]
        elif isinstance(one, list | tuple):
            waiting += [(inner, depth + 1) for inner in one]


def check_json_text(name: str, text: str) -> None:
    """Check a text, and the values in it if it is JSON.

    Raises Refused: as :func:`check_json_value`.
    """
    check_json_value(name, text)
    try:
        value = json.loads(text)
    except ValueError:
        return
    except RecursionError:
        raise Refused(f"{name} is nested too deep", _FLATTER) from None
    check_json_value(name, value)


def _why_not(value: Any) -> str:
    if isinstance(value, int) and not _LEAST <= value <= _MOST:
        return "a number of more than 64 bits"
    if isinstance(value, float) and not math.isfinite(value):
        return "no finite number"
    if isinstance(value, str) and not _is_text(value):
        return "a text with half of a surrogate pair"
    return ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
