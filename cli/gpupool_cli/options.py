"""Options and arguments of several commands, and the daemon that the global options choose."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from gpupoold.api.client import AdminClient
from gpupoold.api.paths import trusted_socket_path
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.units import parse_duration_s

_COMPLETION_TIMEOUT_S = 1.0

SOCKET_VARIABLE = "GPUPOOL_SOCKET"

EngineOption = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="KEY=VALUE",
        help="An argument of `vllm serve`, such as max-num-seqs=16; @FILE reads a value; "
        "may be repeated.",
    ),
]


def duration_s(text: str) -> float:
    """Seconds in an option's value; more than zero.

    Raises typer.BadParameter: it is no duration; Typer adds the option's name.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{text!r} must be more than zero and finite")
    return seconds


def read_pairs(given: Iterable[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each KEY=VALUE given to ``option``."""
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise UsageError(f"{option} {one!r} is not of the form KEY=VALUE", f"such as {example}")
        yield name, value


def set_once(values: dict[str, Any], name: str, value: Any, option: str) -> None:
    """Add a value given to ``option``. Raises UsageError: ``values`` has the name already."""
    if name in values:
        raise UsageError(f"{option} {name} is given twice", "give one value")
    values[name] = value


def model_name(text: str) -> str:
    """Check a model's name as typed. Raises typer.BadParameter: the name is empty."""
    if not text.strip():
        raise typer.BadParameter("a model's name cannot be empty")
    return text


def complete_model_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of registered models, none without a daemon."""
    try:
        with AdminClient(socket_path_of(ctx), timeout_s=_COMPLETION_TIMEOUT_S) as client:
            names = [model.name for model in client.models()]
    except GpupoolError:
        return []
    return [name for name in names if name.startswith(incomplete)]


NameArgument = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        parser=model_name,
        help="Name or alias of a registered model.",
        autocompletion=complete_model_name,
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document instead of text.")
]
TtftOption = Annotated[
    float | None,
    typer.Option(
        "--ttft",
        metavar="DURATION",
        parser=duration_s,
        help="Target for the time to first token, such as 10s or 500ms.",
    ),
]
PaceOption = Annotated[
    str | None,
    typer.Option(
        "--pace",
        metavar="steady|DURATION|off",
        help="Release the tokens of streams evenly: at the TBT target, or faster.",
    ),
]
TbtOption = Annotated[
    float | None,
    typer.Option(
        "--tbt",
        metavar="DURATION",
        parser=duration_s,
        help="Target for the time between tokens, such as 100ms.",
    ),
]
NewNameArgument = Annotated[
    str, typer.Argument(metavar="NAME", parser=model_name, help="The name clients will ask for.")
]
BaseOption = Annotated[
    str,
    typer.Option(
        "--of",
        metavar="MODEL",
        parser=model_name,
        help="The registered model whose weights are used.",
        autocompletion=complete_model_name,
    ),
]
RevisionOption = Annotated[
    str | None,
    typer.Option("--revision", metavar="R", help="Branch, tag or commit on Hugging Face."),
]


def open_client(ctx: typer.Context) -> AdminClient:
    """Return a client of the chosen daemon; use as a context manager."""
    return AdminClient(socket_path_of(ctx))


def socket_path_of(ctx: typer.Context) -> Path:
    """Return the chosen admin socket.

    Raises Refused: no socket is named, and the default folder cannot be trusted.
    """
    chosen: Path | None = ctx.find_root().params.get("socket_path")
    return chosen or trusted_socket_path()


def global_options(
    socket_path: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            envvar=SOCKET_VARIABLE,
            help="The daemon's admin socket; default: the daemon's default path.",
        ),
    ] = None,
) -> None:
    """Name the global options, which :func:`socket_path_of` reads."""


def read_options(given: Iterable[str]) -> dict[str, str]:
    """Return the options by name, with values from files read.

    Raises UsageError: an option has no value, is repeated, or names an unreadable file.
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
