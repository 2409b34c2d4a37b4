"""What is wrong in a configuration file, in words that name the key and what to write."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from pydantic_core import ErrorDetails

from gpupoold.errors import ConfigError

KnownKeys = Mapping[str, Sequence[str]]
"""Section → its keys, as the file spells them."""


def config_error(origin: str, problems: Sequence[ErrorDetails], known: KnownKeys) -> ConfigError:
    """The first problem that pydantic found in ``origin``, and how many more there are."""
    # An unknown key first: it often explains the others (a misspelt required key).
    problem = min(problems, key=lambda details: details["type"] != "extra_forbidden")
    where, what, hint = _describe(problem, known)
    if len(problems) > 1:
        hint = "; ".join(filter(None, [hint, f"{len(problems) - 1} more wrong in this file"]))
    return ConfigError(f"{origin}: {where}: {what}" if where else f"{origin}: {what}", hint)


def _describe(problem: ErrorDetails, known: KnownKeys) -> tuple[str, str, str]:
    """Dotted key, what is wrong, and what to do about it."""
    parts = problem["loc"]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in parts).lstrip(".")
    match problem["type"]:
        case "extra_forbidden":
            return where, "unknown key", _nearest(parts, known)
        case "missing":
            return where, "is missing", ""
        case "model_type":
            name = str(parts[0])
            header = f"[[{name}]]" if name == "device" else f"[{name}]"
            return where, "must be a table", f"write it under {header}"
        case "value_error" if parts == ("device",) and isinstance(problem["input"], dict):
            return where, "must be a list of tables", "write [[device]], with two brackets"
    message = problem["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    shown = f", got {problem['input']!r}" if problem["type"] != "value_error" else ""
    return where, f"{message}{shown}", ""


def _nearest(parts: tuple[int | str, ...], keys: KnownKeys) -> str:
    """The key that was probably meant, or the section where the key belongs."""
    name = str(parts[-1])
    known = list(keys) if len(parts) == 1 else list(keys.get(str(parts[0]), ()))
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    for section, names in keys.items():
        if name in names:
            return f"{name!r} belongs in [{section}]"
    return f"known here: {', '.join(known)}"
