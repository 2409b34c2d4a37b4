"""``make-tiny-models``: small random checkpoints to try gpupool with, made offline."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from pydantic import BaseModel

from gpupool_cli import output
from gpupool_cli.options import JsonOption
from gpupoold.errors import Failed, GpupoolError, error_from_code
from gpupoold.units import format_bytes

# Run by name: it needs torch, which this process must never load.
_MAKER = "gpupoold.checkpoints.tiny"
_COLUMNS = (output.Column("NAME"), output.Column("SIZE", right=True), output.Column("PATH"))


class TinyModel(BaseModel):
    """One made checkpoint."""

    name: str
    path: str
    size_bytes: int


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("make-tiny-models")(make_tiny_models)


def make_tiny_models(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to make the folders.")],
    size: Annotated[str, typer.Option(help="Weights of each model at float32.")] = "10MB",
    arch: Annotated[str, typer.Option(help="llama, qwen2, qwen3, mixtral or all.")] = "all",
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    seed: Annotated[int, typer.Option(help="Seed of the random weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Make small random models to try gpupool with; needs no network and no daemon."""
    options = [f"--size={size}", f"--arch={arch}", f"--dtype={dtype}", f"--seed={seed}"]
    made = run_maker([*options, "--", str(directory)])
    if as_json:
        output.print_json(made)
    else:
        rows = [(model.name, format_bytes(model.size_bytes), model.path) for model in made]
        output.print_table(_COLUMNS, rows)


def run_maker(arguments: list[str]) -> list[TinyModel]:
    """Make checkpoints in a child process.

    Raises:
        GpupoolError: what the child reported, or ``Failed`` with its last words.
    """
    command = [sys.executable, "-m", _MAKER, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _error_of(done.stderr)
    return [TinyModel.model_validate_json(line) for line in done.stdout.splitlines()]


def _error_of(stderr: str) -> GpupoolError:
    last_line = (stderr.strip().splitlines() or ["it said nothing"])[-1]
    try:
        fields = json.loads(last_line)
        return error_from_code(fields["code"], fields["message"], fields["hint"])
    except (ValueError, KeyError, TypeError):
        hint = "gpupool's full environment is needed: run make venv"
        return Failed(f"the models could not be made: {last_line}", hint)
