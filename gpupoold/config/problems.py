"""Problems in a configuration file, with the key and a remedy."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from pydantic_core import ErrorDetails

from gpupoold.errors import ConfigError
from gpupoold.printable import plain_problem

KnownKeys = Mapping[str, Sequence[str]]
"""Sections and their keys, spelled as in a file."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem: place, description, and a remedy, which may be empty.

    ``where`` has the names of section and key, and indexes of lists.
    """

    where: tuple[int | str, ...]
    what: str
    hint: str = ""

    @property
    def key(self) -> str:
        """Dotted, as in ``device[0].memory``; empty for the file as a whole."""
        return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in self.where).lstrip(".")

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" if self.where else self.what


def place_of(key: str) -> tuple[int | str, ...]:
    """Return the parts of a dotted key, the reverse of ``Problem.key``."""
    parts = re.split(r"\.|(?=\[)", key)
    return tuple(int(one[1:-1]) if one.startswith("[") else one for one in parts)


def config_error(origin: str, problems: Sequence[Problem]) -> ConfigError:
    """Return an error with the first problem, and the number of further problems."""
    first, *others = problems
    more = f"{len(others)} more {'problem' if len(others) == 1 else 'problems'} in this file"
    more = more if others else ""
    return ConfigError(f"{origin}: {first}", "; ".join(filter(None, [first.hint, more])))


def problems_of(
    errors: Sequence[ErrorDetails], known: KnownKeys, hidden: Collection[str] = ()
) -> list[Problem]:
    """Convert pydantic's errors to problems; values of ``hidden`` keys are not shown."""
    # Unknown keys first, because a misspelt key often explains a missing key.
    ordered = sorted(errors, key=lambda details: details["type"] != "extra_forbidden")
    return [_problem(details, known, hidden) for details in ordered]


def _problem(problem: ErrorDetails, known: KnownKeys, hidden: Collection[str]) -> Problem:
    parts = problem["loc"]
    match problem["type"]:
        case "extra_forbidden":
            return Problem(parts, "unknown key", _nearest(parts, known))
        case "missing":
            return Problem(parts, "is missing")
        case "model_type":
            name = str(parts[0])
            header = f"[[{name}]]" if name == "device" else f"[{name}]"
            return Problem(parts, "must be a table", f"write the keys under {header}")
        case "value_error" if parts == ("device",) and isinstance(problem["input"], dict):
            return Problem(parts, "must be a list of tables", "write [[device]], with two brackets")
        case "at_key":
            return Problem(place_of(problem["ctx"]["key"]), problem["msg"])
    message = plain_problem(problem["msg"])
    is_shown = problem["type"] != "value_error" and ".".join(map(str, parts[:2])) not in hidden
    return Problem(parts, f"{message}, got {problem['input']!r}" if is_shown else message)


def _nearest(parts: tuple[int | str, ...], keys: KnownKeys) -> str:
    """Return a hint: the nearest known key, or the section of the key."""
    name = str(parts[-1])
    known = list(keys) if len(parts) == 1 else list(keys.get(str(parts[0]), ()))
    if near := difflib.get_close_matches(name, known, n=1):
        return f"did you mean {near[0]!r}?"
    for section, names in keys.items():
        if name in names:
            return f"{name!r} belongs in [{section}]"
    return f"known here: {', '.join(known)}"
