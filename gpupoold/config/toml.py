"""Parsing of a configuration's text, bounded in depth."""

from __future__ import annotations

import tomllib
from typing import Any

MAX_DEPTH = 32


def loads(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises:
        tomllib.TOMLDecodeError: the text is not TOML, or nested too deep.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level: list[Any] = [tables]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for one in level
            if isinstance(one, dict | list)
            for item in (one.values() if isinstance(one, dict) else one)
        ]
    if level:
        raise _too_deep()
    return tables


def _too_deep() -> tomllib.TOMLDecodeError:
    return tomllib.TOMLDecodeError(f"nested more than {MAX_DEPTH} levels deep")
