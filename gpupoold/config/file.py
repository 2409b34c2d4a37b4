"""A configuration file: its settings, the keys written in the file, and its problems by line."""

from __future__ import annotations

import os
import re
import socket
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpupoold.access.tls import check_files
from gpupoold.config import schema
from gpupoold.config.fitting import fitted
from gpupoold.config.machine import Machine, unusable_gpu
from gpupoold.config.schema import (
    Problem,
    Settings,
    chosen_path,
    examine,
    parse_settings,
    place_of,
    read_text,
    with_device_tables,
    without,
)
from gpupoold.config.sections import ServerSettings
from gpupoold.engine_versions import is_built_for_gpus
from gpupoold.errors import ConfigError, Failed, SettingError

Place = tuple[str | int, ...]
"""Names of tables and keys, and indexes of lists, the outermost first."""

# Each line parses the present statement again, so the time grows with the square of a statement.
_MAX_LINES = 5_000
_AT_LINE = re.compile(r"at line (\d+)")
_MAX_DEPTH = 32
_DEVICES = (("device",), ("devices",))


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A file's settings; ``path`` is None for defaults without a file.

    ``written`` has the dotted keys in the file.
    """

    path: Path | None
    settings: Settings
    written: frozenset[str]


def read_config_file(path: Path | None = None) -> ConfigFile:
    """Read the file at ``path``, else the file of :func:`chosen_path`, else the defaults.

    Raises ConfigError: the file cannot be read, is not TOML, or has a wrong value.
    """
    path = path or chosen_path()
    if path is None:
        return parsed_file("", None)
    return parsed_file(read_text(path), path)


def parsed_file(text: str, path: Path | None) -> ConfigFile:
    """Parse the text of a file.

    Raises ConfigError: the text is not TOML or has wrong values; the message lists all problems.
    """
    problems = check_text(text)
    if problems:
        reported = "; ".join(problem.in_full for problem in problems)
        raise ConfigError(f"{path}: {reported}", f"see `gpupool config check {path}`")
    raw = loads(text)
    settings = parse_settings(raw, str(path or "defaults"))
    written = frozenset(_written(with_device_tables(raw)))
    return ConfigFile(path, settings, written)


def check_text(text: str) -> list[Problem]:
    """Return all problems in the text of a configuration file, in order of lines."""
    try:
        raw = loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _AT_LINE.search(str(error))  # none for the end of the text
        line = int(match[1]) if match else text.count("\n") + 1
        return [Problem((), f"is not valid TOML: {error}", line=line)]
    _, problems = examine(raw)
    if not problems:
        return []
    return sorted(_with_lines(problems, text), key=lambda line: line.line or 0)


def check_on_machine(text: str, machine: Callable[[Settings], Machine]) -> list[Problem]:
    """Return the problems of a text with a ``machine``, and with the files named in the text.

    Sections and keys with problems of their own are left out. If the devices have a problem, the
    machine is not looked at, because further problems would be misleading.
    """
    settings = _settings_without_problems(text)
    if settings is None:
        return []
    found = [*_problems_of_files(settings), *_problems_of_machine(settings, machine(settings))]
    return _with_lines(found, text)


def _settings_without_problems(text: str) -> Settings | None:
    try:
        raw = loads(text)
    except tomllib.TOMLDecodeError:
        return None
    settings, problems = examine(raw)
    if settings is not None or any(problem.where[:1] in _DEVICES for problem in problems):
        return settings
    settings, _ = examine(without(raw, [problem.where for problem in problems]))
    return settings


def _problems_of_files(settings: Settings) -> Iterator[Problem]:
    server = settings.server
    if server.tls_cert is None or server.tls_key is None:
        return
    try:
        check_files(server.tls_cert, server.tls_key)
    except SettingError as error:
        yield _problem_of(error)


def _problems_of_machine(settings: Settings, machine: Machine) -> Iterator[Problem]:
    reason = _why_not_listen(settings.server)
    if reason:
        what = f"{settings.server.host!r} is no address to listen at: {reason}"
        hint = "write an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all"
        yield Problem(("server", "host"), what, hint)
    unusable = unusable_gpu(machine)
    if unusable is not None:
        yield _problem_of(unusable)
    try:
        fitted(settings, machine)
    except SettingError as error:
        if unusable is None or not error.key.startswith(unusable.key):
            yield _problem_of(error)


def _problem_of(error: SettingError) -> Problem:
    return Problem(place_of(error.key), error.what, error.hint)


def _with_lines(problems: Iterable[Problem], text: str) -> list[Problem]:
    lines = lines_of(text)
    return [replace(problem, line=_line(problem, lines)) for problem in problems]


def _line(problem: Problem, lines: dict[Place, int]) -> int | None:
    line = _line_of(problem.where, lines)
    # A device of the short form has no line; errors get the line of ``devices``.
    return lines.get(("devices",)) if line is None and problem.where[:1] == ("device",) else line


def _written(raw: dict[str, Any]) -> Iterator[str]:
    for section, table in raw.items():
        tables = {section: table}
        if isinstance(table, list):
            tables = {f"{section}[{index}]": row for index, row in enumerate(table)}
        for name, keys in tables.items():
            yield from (f"{name}.{key}" for key in keys)


def _why_not_listen(server: ServerSettings) -> str:
    """Return why no socket of this machine can listen at the host, empty if one can.

    A free port is tried, so another program may use the configured one.
    """
    try:
        with socket.socket(server.family, socket.SOCK_STREAM) as listener:
            listener.bind((server.host, 0))
    except OSError as error:
        return error.strerror or str(error)
    return ""


def check_gpus_found(file: ConfigFile, machine: Machine) -> None:
    """Check that the GPUs which a daemon's file or engine ask for are there.

    Raises Failed: a GPU is missing. The driver may be loaded later, so another start may succeed.
    """
    problem, fix = missing_gpus(file)
    if problem:
        raise Failed(problem, fix)
    unusable = unusable_gpu(machine)
    if unusable is not None:
        raise Failed(unusable.message, unusable.hint)


def missing_gpus(file: ConfigFile) -> tuple[str, str]:
    """Return why GPUs were expected and not found, and a remedy; empty texts if all is well."""
    has_devices = any(key.startswith("device[") for key in file.written)
    has_gpus = any(device.kind == "cuda" for device in file.settings.devices)
    if has_devices or has_gpus or not is_built_for_gpus():
        return "", ""
    expected = "vLLM is built for GPUs, and the configuration names no devices"
    if schema.NVIDIA_GPUS.is_dir() and any(schema.NVIDIA_GPUS.iterdir()):
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        problem = f"CUDA_VISIBLE_DEVICES is {hidden!r}, so no GPU is visible; {expected}"
        return problem, "unset the variable, or write devices into the configuration"
    problem = f"no NVIDIA GPU was found (no entry in {schema.NVIDIA_GPUS}); {expected}"
    return problem, (
        "check the driver with nvidia-smi, and load it: modprobe nvidia. Under WSL write "
        "'devices = [\"cuda:0\"]' into the configuration. To run without a GPU: "
        "make venv GPUPOOL_DEVICE=cpu"
    )


def loads(text: str) -> dict[str, Any]:
    """Return the tables of a TOML text.

    Raises tomllib.TOMLDecodeError: the text is not TOML, or nested too deep.
    """
    try:
        tables = tomllib.loads(text)
    except RecursionError:
        raise _too_deep() from None
    level: list[Any] = [tables]
    for _ in range(_MAX_DEPTH):
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
    return tomllib.TOMLDecodeError(f"nested more than {_MAX_DEPTH} levels deep")


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


def _line_of(where: Sequence[str | int], lines: dict[Place, int]) -> int | None:
    """Return the line of ``where``, or of the innermost parent with a line, or None."""
    for length in range(len(where), 0, -1):
        if (line := lines.get(tuple(where[:length]))) is not None:
            return line
    return None


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
