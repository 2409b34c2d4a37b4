"""``gpupool bench``: the benchmarks of the checkout, where there is one."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from gpupoold.errors import Refused

_CHECKOUT = Path(__file__).resolve().parents[2]


def register(app: typer.Typer) -> None:
    """Add the commands of the package ``benchmarks``, or one that says where they are."""
    if str(_CHECKOUT) not in sys.path:
        sys.path.append(str(_CHECKOUT))
    try:
        from benchmarks.bench.commands import app as commands
    except ModuleNotFoundError as missing:
        if missing.name is None or not "benchmarks.bench.commands".startswith(missing.name):
            raise
        settings = {"allow_extra_args": True, "ignore_unknown_options": True}
        app.command("bench", context_settings=settings)(_absent)
    else:
        app.add_typer(commands, name="bench")


def _absent() -> None:
    """Measure this machine, with a limit beside each figure; part of a checkout of gpupool."""
    raise Refused(
        "the benchmarks are not part of this installation",
        "run `gpupool bench` of a checkout of gpupool, after `make venv`",
    )
