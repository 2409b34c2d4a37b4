"""``--engine KEY=VALUE``: options of vLLM for one model."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from gpupool_cli.options import read_pairs, set_once
from gpupoold.errors import UsageError

EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="KEY=VALUE",
        help="An argument of `vllm serve`, such as max-num-seqs=16; @FILE reads a value; "
        "may be repeated.",
    ),
]


def read_options(given: Iterable[str]) -> dict[str, str]:
    """Return the options by name, with values from files read.

    Raises:
        UsageError: an option has no value, is repeated, or names an unreadable file.
    """
    options: dict[str, str] = {}
    for name, value in read_pairs(given, "--engine", "seed=1"):
        first, dot, keys = name.strip().removeprefix("--").partition(".")
        name = f"{first.replace('-', '_')}{dot}{keys}"
        value = _read_file(name, value[1:]) if value.startswith("@") else value
        set_once(options, name, value, "--engine")
    return options


def _read_file(name: str, path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        text = f"--engine {name}: {path} cannot be read: {error}"
        raise UsageError(text, "check the file") from error
