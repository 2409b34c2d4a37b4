"""``config`` and ``reload``: show, check, compare and reload the configuration."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import ExitCode, say
from gpupool_cli.options import JsonOption, open_client
from gpupool_cli.output import NOTHING, Column, columns
from gpupoold.api.schemas import ChangeInfo, ConfigInfo, SettingInfo
from gpupoold.config.file import check_on_machine, check_text, parsed_file
from gpupoold.config.fitting import fitted
from gpupoold.config.keys import config_info
from gpupoold.config.schema import Problem, chosen_path, read_text
from gpupoold.doctor.checks import Check, Verdict
from gpupoold.doctor.machine import find_machine

app = typer.Typer(no_args_is_help=True, help="Show, check and compare the configuration.")

FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="[FILE]", help="A configuration file; default: the file in use."),
]

_EFFECTS = {
    "live": "at once",
    "loads": "for models loaded from then on",
    "restart": "after a restart of gpupoold",
}
_COLUMNS = columns("KEY, NOW, FILE, HEEDED")

_LIST_INDEX = re.compile(r"\[\d+\]$")

_CHECK_COLUMNS = columns("CHECK, VERDICT*, FOUND")


@app.command("check")
def check(file: FileArgument = None, as_json: JsonOption = False) -> None:
    """Check a configuration file; print all problems with lines. Needs no daemon.

    GPUs, budgets of memory and the address are checked against this machine. Exit status 0 without
    problems, 1 otherwise.
    """
    path = file or chosen_path()
    text = "" if path is None else read_text(path)
    found = check_text(text) + check_on_machine(text, find_machine)
    problems = sorted(found, key=lambda problem: problem.line or 0)
    if as_json:
        shown = [
            {"key": found.key, "line": found.line, "problem": found.what, "hint": found.hint}
            for found in problems
        ]
        output.print_json({"path": None if path is None else str(path), "problems": shown})
    elif path is None:
        say("there is no file: the defaults hold")
    elif not problems:
        say(f"{path}: no errors")
    else:
        for problem in problems:
            _print_problem(path, problem)
    if problems:
        raise typer.Exit(ExitCode.FAILED)


@app.command("show")
def show(
    ctx: typer.Context,
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="The default values on this machine; needs no daemon."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print every key with the running daemon's value, in the form of a file.

    The comment behind a value says whether the value is from the file, a default, or worked out
    from the machine, with the arithmetic.
    """
    if defaults:
        settings = parsed_file("", None).settings
        here = fitted(settings, find_machine(settings))
        info = config_info(here.settings, None, (), here.budgets.reasons)
    else:
        with open_client(ctx) as client:
            info = client.config()
    if as_json:
        output.print_json(info)
    else:
        output.print_line(as_toml(info, with_origin=not defaults))


@app.command("diff")
def diff(ctx: typer.Context, file: FileArgument = None, as_json: JsonOption = False) -> None:
    """Show the changes that a file would make in the running daemon, and their effect."""
    with open_client(ctx) as client:
        if file is None:
            answer = client.config_diff()
        else:
            answer = client.config_diff(read_text(file), str(file))
    if as_json:
        output.print_json(answer)
    elif not answer.changes:
        say(f"{_named(answer.path)}: no key would change")
    else:
        _print_changes(answer.changes)


def reload(ctx: typer.Context, as_json: JsonOption = False) -> None:
    """Make the daemon read its configuration again.

    A file with an error changes nothing. No model is loaded again.
    """
    with open_client(ctx) as client:
        answer = client.reload()
    if as_json:
        output.print_json(answer)
        return
    if answer.changed or answer.waiting:
        _print_changes([*answer.changed, *answer.waiting], ("BEFORE", "FILE"))
    waiting = ""
    if answer.waiting:
        verb = "waits" if len(answer.waiting) == 1 else "wait"
        waiting = f", {len(answer.waiting)} {verb} for a restart of gpupoold"
    changed = f"{len(answer.changed)} changed" if answer.changed else "no key has changed"
    say(f"{_named(answer.path)} was read again: {changed}{waiting}")


def _print_changes(changes: list[ChangeInfo], titles: tuple[str, str] = ("NOW", "FILE")) -> None:
    key, _, _, heeded = _COLUMNS
    columns = (key, *map(Column, titles), heeded)
    output.print_table(columns, [_row(change) for change in changes])


def _row(change: ChangeInfo) -> list[str]:
    shown = map(value_text, (change.before, change.after))
    return [change.key, *shown, _EFFECTS[change.effect]]


def _print_problem(path: Path, problem: Problem) -> None:
    place = str(path) if problem.line is None else f"{path}:{problem.line}"
    output.print_line(f"{place}: {problem}")
    if problem.hint:
        output.print_line(f"    {problem.hint}")


def _named(path: str | None) -> str:
    return path or "no file, the defaults"


def as_toml(info: ConfigInfo, *, with_origin: bool) -> str:
    """Return all keys under their sections; ``with_origin`` adds each value's origin.

    The arithmetic of values that were worked out is always added.

    The text is valid TOML: keys that are not set are comments.
    """
    sections: dict[str, list[SettingInfo]] = {}
    for setting in info.settings:
        sections.setdefault(setting.key.rpartition(".")[0], []).append(setting)
    blocks = [_block(name, settings, with_origin) for name, settings in sections.items()]
    if with_origin:
        source = f"from {info.path}" if info.path else "without a file"
        blocks.insert(0, f"# The settings of gpupoold, {source}.")
    return "\n\n".join(blocks)


def value_text(value: object) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    # JSON strings are TOML strings, except for one character that TOML requires escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007F")


def _block(name: str, settings: list[SettingInfo], with_origin: bool) -> str:
    is_listed = _LIST_INDEX.search(name)
    header = f"[[{_LIST_INDEX.sub('', name)}]]" if is_listed else f"[{name}]"
    lines = [(_line(setting), _comment(setting, with_origin)) for setting in settings]
    width = max(len(line) for line, _ in lines)
    shown = [f"{line:<{width}}  # {comment}" if comment else line for line, comment in lines]
    return "\n".join([header, *shown])


def _comment(setting: SettingInfo, with_origin: bool) -> str:
    if setting.reason:
        return f"{setting.origin}: {setting.reason}"
    return setting.origin if with_origin else ""


def _line(setting: SettingInfo) -> str:
    key = setting.key.rpartition(".")[2]
    return (
        f"# {key} is not set" if setting.value is None else f"{key} = {value_text(setting.value)}"
    )


def doctor(
    ctx: typer.Context,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The configuration; default: the daemon's file."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Look at driver, memory, limits, disks, kernel, versions, configuration and daemon.

    Exit status 0 if nothing is at fault, warnings or not; 1 if something is. Needs no daemon.
    """
    # Imported here, because no other command needs NVML or SQLite.
    from gpupoold.doctor.checks import check_all
    from gpupoold.doctor.probes import find_facts

    checks = list(check_all(find_facts(config, ctx.find_root().params.get("socket_path"))))
    if as_json:
        output.print_json({"checks": [asdict(check) for check in checks]})
    else:
        _show_checks(checks)
    if any(check.verdict is Verdict.FAULT for check in checks):
        raise typer.Exit(ExitCode.FAILED)


def _show_checks(checks: list[Check]) -> None:
    output.print_table(
        _CHECK_COLUMNS, [[check.name, check.verdict.value, check.found] for check in checks]
    )
    for check in checks:
        if check.verdict is not Verdict.OK:
            output.print_line("")
            output.print_styled(
                [f"{check.verdict.value}: {check.name}: {check.found}"], check.verdict
            )
            output.print_line(f"fix: {check.fix}")
