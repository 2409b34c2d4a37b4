"""The ``gpupool`` command: global options and the list of commands."""

from __future__ import annotations

import io
import sys
from collections import UserDict
from importlib import import_module
from typing import Any

import typer
from typer.main import get_group

from gpupool_cli import completion
from gpupool_cli.diagnostics import CliGroup
from gpupool_cli.session import global_options
from gpupoold.system.interrupts import ended_by_interrupts

_PLACES = {
    "add-model": "add_model.add_model",
    "add-adapter": "add_model.add_adapter",
    "add-preset": "add_model.add_preset",
    "list": "models.list_models",
    "ls": "models.list_models",
    "show": "models.show",
    "set": "models.set_model",
    "rm": "models.rm",
    "host": "models.host",
    "status": "status.status",
    "ps": "status.ps",
    "top": "top.top",
    "drain": "workers.drain",
    "undrain": "workers.undrain",
    "park": "workers.park",
    "wake": "workers.wake",
    "unload": "models.unload",
    "cancel": "models.cancel",
    "switches": "history.switches",
    "history": "history.history",
    "usage": "history.usage",
    "batches": "history.batches",
    "why": "why.why",
    "doctor": "doctor.doctor",
    "run": "run.run",
    "events": "history.events",
    "logs": "history.logs",
    "reload": "config.reload",
    "simulate": "planning.simulate.simulate",
    "plan": "planning.plan.plan",
    "replay": "replay.replay",
    "make-tiny-models": "tiny.make_tiny_models",
    "make-dummy-models": "tiny.make_dummy_models",
    "version": "status.version",
    "completion": "completion.completion",
    "role": "workers.app",
    "cache": "cache.app",
    "key": "keys.app",
    "fleet": "fleet.app",
    "config": "config.app",
    "bench": "bench.register",
}
"""Module and function of each command, or the group of commands, in the order of the help."""


class _Commands(UserDict[str, Any]):
    """The commands by name; a module is imported at the first use of a command in the module."""

    def __getitem__(self, name: str) -> Any:
        if isinstance(self.data[name], str):
            self.data[name] = _load(name, self.data[name])
        return self.data[name]


def _load(name: str, place: str) -> Any:
    module, _, attribute = place.rpartition(".")
    with ended_by_interrupts():
        found = getattr(import_module(f"gpupool_cli.{module}"), attribute)
    alone = typer.Typer(rich_markup_mode=None)
    if attribute == "register":
        found(alone)
    elif isinstance(found, typer.Typer):
        alone.add_typer(found, name=name)
    else:
        alone.command(name, hidden=name == "ls")(found)
    return get_group(alone).commands[name]


class _Root(CliGroup):
    """The root command, which loads the command that is used."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = _Commands(_PLACES)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names without loading the commands."""
        return list(_PLACES)


app = typer.Typer(
    cls=_Root,
    name=completion.PROGRAM,
    help="Serve many LLMs on few GPUs: talk to the gpupoold daemon on this machine.",
    epilog="Exit status: 0 ok, 1 failed, 2 usage, 3 daemon not running, 4 no such model or request,"
    " 5 refused, 6 timed out, 130 interrupted.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.callback()(global_options)


def main() -> None:
    """Entry point of the console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may answer with characters outside the terminal's encoding.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name=completion.PROGRAM)


if __name__ == "__main__":
    main()
