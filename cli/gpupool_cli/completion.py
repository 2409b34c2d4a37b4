"""``completion``: the script for completion in a shell."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from typer.completion import shell_complete

PROGRAM = "gpupool"
_VARIABLE = f"_{PROGRAM.upper()}_COMPLETE"


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
