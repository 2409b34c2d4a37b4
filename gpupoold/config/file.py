"""A configuration file: its settings, and the keys written in the file."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpupoold.access.tls import TlsError, check_files
from gpupoold.config.fitting import fitted
from gpupoold.config.lines import line_of, line_of_error, lines_of
from gpupoold.config.machine import Machine, MachineError
from gpupoold.config.problems import Problem, place_of
from gpupoold.config.renamed import renamed_keys
from gpupoold.config.schema import (
    Settings,
    chosen_path,
    examine,
    parse_settings,
    read_text,
    with_device_tables,
)
from gpupoold.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file's settings; ``path`` is None for defaults without a file.

    ``written`` has the dotted keys in the file, ``renamed`` a sentence for each old name of a key.
    """

    path: Path | None
    settings: Settings
    written: frozenset[str]
    renamed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacedProblem:
    """A problem and its line, counted from 1; None for a problem without a line."""

    problem: Problem
    line: int | None

    def __str__(self) -> str:
        place = "" if self.line is None else f"line {self.line}: "
        hint = f" ({self.problem.hint})" if self.problem.hint else ""
        return f"{place}{self.problem}{hint}"


def read_config_file(path: Path | None = None) -> ConfigFile:
    """Read the file at ``path``, else the file of :func:`chosen_path`, else the defaults.

    Raises:
        ConfigError: the file cannot be read, is not TOML, or has a wrong value.
    """
    path = path or chosen_path()
    if path is None:
        return parsed_file("", None)
    return parsed_file(read_text(path), path)


def parsed_file(text: str, path: Path | None) -> ConfigFile:
    """Parse the text of a file.

    Raises:
        ConfigError: the text is not TOML or has wrong values; the message lists all problems.
    """
    problems = check_text(text)
    if problems:
        reported = "; ".join(map(str, problems))
        raise ConfigError(f"{path}: {reported}", f"see `gpupool config check {path}`")
    raw = tomllib.loads(text)
    settings = parse_settings(raw, str(path or "defaults"))
    written = frozenset(_written(with_device_tables(raw)))
    return ConfigFile(path, settings, written, renamed_keys(raw))


def check_text(text: str) -> list[PlacedProblem]:
    """Return all problems in the text of a configuration file, in order of lines."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem((), f"is not valid TOML: {error}")
        return [PlacedProblem(problem, line_of_error(error) or text.count("\n") + 1)]
    _, problems = examine(raw)
    if not problems:
        return []
    lines = lines_of(text)
    placed = [PlacedProblem(one, _line(one, lines)) for one in problems]
    return sorted(placed, key=lambda one: one.line or 0)


def check_named_files(text: str) -> list[PlacedProblem]:
    """Return the problems with the files named in a text without problems.

    Raises:
        ConfigError: the text has problems.
    """
    server = parsed_file(text, None).settings.server
    if server.tls_cert is None or server.tls_key is None:
        return []
    try:
        check_files(server.tls_cert, server.tls_key)
    except TlsError as error:
        problem = Problem(("server", error.key), error.what, error.hint)
        return [PlacedProblem(problem, _line(problem, lines_of(text)))]
    return []


def check_on_machine(text: str, machine: Callable[[Settings], Machine]) -> list[PlacedProblem]:
    """Return the problem with groups or budgets of a text without problems on a ``machine``.

    Raises:
        ConfigError: the text has problems.
    """
    settings = parsed_file(text, None).settings
    try:
        fitted(settings, machine(settings))
    except MachineError as error:
        problem = Problem(place_of(error.key), error.what, error.hint)
        return [PlacedProblem(problem, _line(problem, lines_of(text)))]
    return []


def _line(problem: Problem, lines: dict[tuple[str | int, ...], int]) -> int | None:
    line = line_of(problem.where, lines)
    # A device of the short form has no line; errors get the line of ``devices``.
    return lines.get(("devices",)) if line is None and problem.where[:1] == ("device",) else line


def _written(raw: dict[str, Any]) -> Iterator[str]:
    for section, table in raw.items():
        tables = {section: table}
        if isinstance(table, list):
            tables = {f"{section}[{index}]": one for index, one in enumerate(table)}
        for name, keys in tables.items():
            yield from (f"{name}.{key}" for key in keys)
