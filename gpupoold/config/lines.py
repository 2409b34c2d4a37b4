"""Line numbers of the keys in a TOML text, because ``tomllib`` returns none. Pure."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence

from gpupoold.config.toml import loads

Place = tuple[str | int, ...]
"""Names of tables and keys, and indexes of lists, the outermost first."""

# Each line parses the present statement again, so the time grows with the square of a statement.
_MAX_LINES = 5_000
_AT_LINE = re.compile(r"at line (\d+)")


def lines_of(text: str) -> dict[Place, int]:
    """Return the line, from 1, on which each table and key of a valid text begins.

    The result is empty for a text too long to be a configuration.
    """
    lines = text.split("\n")
    if len(lines) > _MAX_LINES:
        return {}
    found: dict[Place, int] = {}
    table: Place = ()
    statement, began = "", 1
    for number, line in enumerate(lines, start=1):
        began = began if statement else number
        statement += line + "\n"
        try:
            written = loads(statement)
        except tomllib.TOMLDecodeError:
            continue  # the statement continues in the next line
        if statement.lstrip().startswith("["):
            table = _header(written, found)
            found[table] = began
        else:
            _note(written, table, began, found)
        statement = ""
    return found


def line_of(where: Sequence[str | int], lines: dict[Place, int]) -> int | None:
    """Return the line of ``where``, or of the innermost parent with a line, or None."""
    for length in range(len(where), 0, -1):
        if (line := lines.get(tuple(where[:length]))) is not None:
            return line
    return None


def line_of_error(error: tomllib.TOMLDecodeError) -> int | None:
    """Return the line of a TOML error, None for the end of the text."""
    match = _AT_LINE.search(str(error))
    return int(match[1]) if match is not None else None


def _header(written: object, found: dict[Place, int]) -> Place:
    """Return the place of a header's table; the index in a list of tables is the next index."""
    place: Place = ()
    while isinstance(written, dict) and written:
        [(name, written)] = written.items()
        place += (name,)
        if isinstance(written, list):
            place += (sum(one[:-1] == place for one in found if isinstance(one[-1], int)),)
            [written] = written
    return place


def _note(written: object, place: Place, line: int, found: dict[Place, int]) -> None:
    if isinstance(written, list):
        written = dict(enumerate(written))
    for name, value in written.items() if isinstance(written, dict) else ():
        found.setdefault((*place, name), line)
        _note(value, (*place, name), line, found)
