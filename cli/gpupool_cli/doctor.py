"""``doctor``: check the machine, the configuration and the daemon, and name remedies."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli import output
from gpupool_cli.diagnostics import ExitCode
from gpupool_cli.options import JsonOption
from gpupool_cli.output import columns
from gpupoold.doctor.checks import Check, Verdict

_COLUMNS = columns("CHECK, VERDICT*, FOUND")


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

    checks = check_all(find_facts(config, ctx.find_root().params.get("socket_path")))
    if as_json:
        output.print_json({"checks": [asdict(check) for check in checks]})
    else:
        _show(checks)
    if any(check.verdict is Verdict.FAULT for check in checks):
        raise typer.Exit(ExitCode.FAILED)


def _show(checks: list[Check]) -> None:
    output.print_table(
        _COLUMNS, [[check.name, check.verdict.value, check.found] for check in checks]
    )
    for check in checks:
        if check.verdict is not Verdict.OK:
            output.print_line("")
            output.print_styled(
                [f"{check.verdict.value}: {check.name}: {check.found}"], check.verdict
            )
            output.print_line(f"fix: {check.fix}")
