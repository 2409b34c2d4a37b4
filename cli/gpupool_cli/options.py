"""Options and arguments of several commands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated, Any, NamedTuple

import typer

from gpupoold.api.client import AdminClient
from gpupoold.api.paths import trusted_socket_path
from gpupoold.errors import GpupoolError, UsageError
from gpupoold.sim.host import HostWishes
from gpupoold.units import parse_duration_s, parse_size_bytes

_COMPLETION_TIMEOUT_S = 1.0


def duration_s(text: str) -> float:
    """Seconds in an option's value; more than zero.

    Raises:
        typer.BadParameter: it is no duration; Typer adds the option's name.
    """
    try:
        seconds = parse_duration_s(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if not 0 < seconds < math.inf:
        raise typer.BadParameter(f"{text!r} must be more than zero and finite")
    return seconds


def size_bytes(text: str) -> int:
    """Bytes in an option's value.

    Raises:
        typer.BadParameter: it is no size; Typer adds the option's name.
    """
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


class EngineSizes(NamedTuple):
    """Bytes of an engine, and of the engines of some models."""

    num_bytes: int
    own_bytes: tuple[tuple[str, int], ...]


def engine_memory(text: str) -> EngineSizes:
    """Parse the memory of engines: ``280MB`` or ``280MB,large-model=900MB``.

    Raises:
        typer.BadParameter: a part is no size; Typer adds the option's name.
    """
    first, *others = text.split(",")
    pairs = [part.partition("=") for part in others]
    if not all(separator for _, separator, _ in pairs):
        raise typer.BadParameter(f"{text!r}: write for example 280MB,large-model=900MB")
    own = tuple((name.strip(), size_bytes(size.strip())) for name, _, size in pairs)
    return EngineSizes(size_bytes(first.strip()), own)


def _size_option(name: str, text: str) -> Any:
    return typer.Option(name, parser=size_bytes, metavar="SIZE", help=text)


KvHostOption = Annotated[
    int | None,
    _size_option(
        "--kv-host", "Host memory for KV of each GPU, as memory.kv_host; default: as the daemon."
    ),
]
PrefixCacheOption = Annotated[
    int | None,
    _size_option(
        "--prefix-cache",
        "Host memory for KV of ended requests; default: what other KV leaves. 0: none.",
    ),
]
ModelCacheOption = Annotated[
    int | None,
    _size_option(
        "--model-cache", "Host memory for models, as memory.model_cache; default: as the daemon."
    ),
]
EngineMemoryOption = Annotated[
    EngineSizes | None,
    typer.Option(
        "--engine-memory",
        parser=engine_memory,
        metavar="SIZE[,MODEL=SIZE...]",
        help="Memory of an engine outside the pages, as `gpupool show` says; default: none.",
    ),
]
EnginesLimitOption = Annotated[
    int | None,
    _size_option(
        "--engines-limit",
        "Limit for the engines of a GPU, as memory.engines; default: as the daemon.",
    ),
]
EngineLoadOption = Annotated[
    float | None,
    typer.Option(
        "--engine-load",
        parser=duration_s,
        metavar="DURATION",
        help="Time to load an engine that was evicted; default: 13s.",
    ),
]


def host_wishes(
    kv_host: int | None,
    model_cache: int | None,
    engines: EngineSizes | None,
    engines_limit: int | None,
    engine_load: float | None,
    prefix_cache: int | None = None,
) -> HostWishes:
    """Return the budgets of a simulated box as given by options."""
    num_bytes, own_bytes = (None, ()) if engines is None else engines
    return HostWishes(
        kv_host, model_cache, num_bytes, engines_limit, engine_load, prefix_cache, own_bytes
    )


def read_pairs(given: Iterable[str], option: str, example: str) -> Iterator[tuple[str, str]]:
    """Yield name and value of each KEY=VALUE given to ``option``."""
    for one in given:
        name, equals, value = one.partition("=")
        if not name or not equals:
            raise UsageError(f"{option} {one!r} is not of the form KEY=VALUE", f"such as {example}")
        yield name, value


def set_once(values: dict[str, Any], name: str, value: Any, option: str) -> None:
    """Add a value given to ``option``.

    Raises:
        UsageError: ``values`` has the name already.
    """
    if name in values:
        raise UsageError(f"{option} {name} is given twice", "give one value")
    values[name] = value


def model_name(text: str) -> str:
    """Check a model's name as typed.

    Raises:
        typer.BadParameter: the name is empty.
    """
    if not text.strip():
        raise typer.BadParameter("a model's name cannot be empty")
    return text


def complete_model_name(ctx: typer.Context, incomplete: str) -> list[str]:
    """Return names of registered models, none without a daemon."""
    try:
        socket_path = ctx.find_root().params.get("socket_path") or trusted_socket_path()
        with AdminClient(socket_path, timeout_s=_COMPLETION_TIMEOUT_S) as client:
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
