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
from gpupoold.config.listening import why_not_listen
from gpupoold.config.machine import Machine, MachineError
from gpupoold.config.problems import Problem, place_of
from gpupoold.config.schema import (
    Settings,
    chosen_path,
    examine,
    parse_settings,
    read_text,
    with_device_tables,
    without,
)
from gpupoold.config.toml import loads
from gpupoold.config.unusable_gpus import unusable_gpu
from gpupoold.errors import ConfigError

_DEVICES = (("device",), ("devices",))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file's settings; ``path`` is None for defaults without a file.

    ``written`` has the dotted keys in the file.
    """

    path: Path | None
    settings: Settings
    written: frozenset[str]


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
    raw = loads(text)
    settings = parse_settings(raw, str(path or "defaults"))
    written = frozenset(_written(with_device_tables(raw)))
    return ConfigFile(path, settings, written)


def check_text(text: str) -> list[PlacedProblem]:
    """Return all problems in the text of a configuration file, in order of lines."""
    try:
        raw = loads(text)
    except tomllib.TOMLDecodeError as error:
        problem = Problem((), f"is not valid TOML: {error}")
        return [PlacedProblem(problem, line_of_error(error) or text.count("\n") + 1)]
    _, problems = examine(raw)
    if not problems:
        return []
    lines = lines_of(text)
    placed = [PlacedProblem(one, _line(one, lines)) for one in problems]
    return sorted(placed, key=lambda one: one.line or 0)


def check_on_machine(text: str, machine: Callable[[Settings], Machine]) -> list[PlacedProblem]:
    """Return the problems of a text with a ``machine``, and with the files named in the text.

    Sections and keys with problems of their own are left out. If the devices have a problem, the
    machine is not looked at, because further problems would be misleading.
    """
    settings = _settings_without_problems(text)
    if settings is None:
        return []
    found = [*_problems_of_files(settings), *_problems_of_machine(settings, machine(settings))]
    lines = lines_of(text)
    return [PlacedProblem(problem, _line(problem, lines)) for problem in found]


def _settings_without_problems(text: str) -> Settings | None:
    try:
        raw = loads(text)
    except tomllib.TOMLDecodeError:
        return None
    settings, problems = examine(raw)
    if settings is not None or any(one.where[:1] in _DEVICES for one in problems):
        return settings
    settings, _ = examine(without(raw, [one.where for one in problems]))
    return settings


def _problems_of_files(settings: Settings) -> Iterator[Problem]:
    server = settings.server
    if server.tls_cert is None or server.tls_key is None:
        return
    try:
        check_files(server.tls_cert, server.tls_key)
    except TlsError as error:
        yield Problem(("server", error.key), error.what, error.hint)


def _problems_of_machine(settings: Settings, machine: Machine) -> Iterator[Problem]:
    reason = why_not_listen(settings.server.host)
    if reason:
        what = f"{settings.server.host!r} is no address to listen at: {reason}"
        hint = "write an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        yield Problem(("server", "host"), what, hint)
    unusable = unusable_gpu(machine)
    if unusable is not None:
        yield Problem(place_of(unusable.key), unusable.what, unusable.hint)
    try:
        fitted(settings, machine)
    except MachineError as error:
        if unusable is None or not error.key.startswith(unusable.key):
            yield Problem(place_of(error.key), error.what, error.hint)


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
