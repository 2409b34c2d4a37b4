"""``make-tiny-models`` and the like: checkpoints to try gpupool with, offline."""

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

# Run by name, because the module needs torch, which this process must not load.
_TINY_MAKER = "gpupoold.checkpoints.tiny"
_DUMMY_MAKER = "gpupoold.checkpoints.dummy"
_COLUMNS = output.columns("NAME, SIZE>, PATH")


class TinyModel(BaseModel):
    """A finished checkpoint; ``size_bytes`` on disk."""

    name: str
    path: str
    size_bytes: int


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
    _print(run_maker([*options, "--", str(directory)]), as_json=as_json)


def make_dummy_models(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to make the folders.")],
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", metavar="MODEL", help="The model's dimensions; may be repeated."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make models of real dimensions without weights, for simulated devices.

    The files take no space on disk. Without --shape the only model is Qwen2.5-7B.
    """
    options = [f"--shape={shape}" for shape in shapes or ()]
    _print(run_maker([*options, "--", str(directory)], _DUMMY_MAKER), as_json=as_json)


def _print(made: list[TinyModel], *, as_json: bool) -> None:
    if as_json:
        output.print_json(made)
    else:
        rows = [(model.name, format_bytes(model.size_bytes), model.path) for model in made]
        output.print_table(_COLUMNS, rows)


def run_maker(arguments: list[str], maker: str = _TINY_MAKER) -> list[TinyModel]:
    """Make checkpoints in a child process, by the module ``maker``.

    Raises GpupoolError: the child's error, or ``Failed`` with its last words.
    """
    command = [sys.executable, "-m", maker, "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise _error_of(done.stderr)
    return [TinyModel.model_validate_json(line) for line in done.stdout.splitlines()]


def _error_of(stderr: str) -> GpupoolError:
    last_line = (stderr.strip().splitlines() or ["no message"])[-1]
    try:
        fields = json.loads(last_line)
        return error_from_code(fields["code"], fields["message"], fields["hint"])
    except (ValueError, KeyError, TypeError):
        is_missing = last_line.startswith(("ImportError", "ModuleNotFoundError"))
        hint = "gpupool's full environment is needed: run make venv" if is_missing else ""
        return Failed(f"the models could not be made: {last_line}", hint)
