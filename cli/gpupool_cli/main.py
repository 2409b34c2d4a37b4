"""The ``gpupool`` command: global options and the list of commands."""

from __future__ import annotations

import io
import sys
from collections import UserDict
from enum import StrEnum
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.completion import shell_complete
from typer.main import get_group

from gpupool_cli.diagnostics import CliGroup
from gpupool_cli.options import global_options
from gpupoold.errors import Refused
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
    "drain": "status.drain",
    "undrain": "status.undrain",
    "park": "status.park",
    "wake": "status.wake",
    "unload": "models.unload",
    "cancel": "models.cancel",
    "switches": "history.switches",
    "history": "history.history",
    "usage": "history.usage",
    "batches": "history.batches",
    "why": "why.why",
    "doctor": "config.doctor",
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
    "completion": "main.completion",
    "role": "status.app",
    "cache": "cache.app",
    "key": "keys.app",
    "fleet": "fleet.app",
    "config": "config.app",
    "bench": "main.register_bench",
}
"""Module and function of each command, or the group of commands, in the order of the help."""

PROGRAM = "gpupool"
_VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"

_CHECKOUT = Path(__file__).resolve().parents[2]


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
    if attribute == "register_bench":
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
    name=PROGRAM,
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
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A model may answer with characters outside the terminal's encoding.
        sys.stdout.reconfigure(errors="replace")
    app(prog_name=PROGRAM)


class Shell(StrEnum):
    """Shells with completion."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    ctx: typer.Context,
    shell: Annotated[Shell, typer.Argument(help="The shell to print the script for.")],
) -> None:
    """Print the completion script of a shell.

    For bash: source <(gpupool completion bash), in ~/.bashrc. For zsh: the same with zsh, in
    ~/.zshrc after compinit. For fish: into ~/.config/fish/completions/gpupool.fish.
    """
    code = shell_complete(ctx.find_root().command, {}, PROGRAM, _VARIABLE, f"source_{shell}")
    raise typer.Exit(code)


def register_bench(app: typer.Typer) -> None:
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


if __name__ == "__main__":
    main()
