"""``unload`` and ``cancel``: taking a model out of memory, ending a request."""

from __future__ import annotations

from typing import Annotated

import typer

from gpupool_cli.diagnostics import say
from gpupool_cli.options import NameArgument
from gpupool_cli.session import open_client
from gpupoold.api.schemas_top import UnloadMode
from gpupoold.errors import UsageError
from gpupoold.units import format_bytes


def unload(
    ctx: typer.Context,
    name: NameArgument,
    drain: Annotated[
        bool, typer.Option("--drain", help="Refuse new requests and wait for live requests.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="End live requests with an error.")
    ] = False,
    keep_host: Annotated[
        bool,
        typer.Option("--keep-host", help="Free devices only; the snapshot stays in host memory."),
    ] = False,
) -> None:
    """Take a model off all devices and out of host memory; the model stays registered.

    The next request loads the model again. Refused while the model has live requests, unless an
    option says how to treat them, and while its snapshot is pinned.
    """
    if drain and force:
        raise UsageError("--drain and --force exclude each other", "give one of the two")
    mode: UnloadMode = "drain" if drain else "force" if force else "refuse"
    with open_client(ctx) as client:
        freed = client.unload(name, mode, keep_host=keep_host)
    device, host = format_bytes(freed.device_bytes), format_bytes(freed.host_bytes)
    say(f"{freed.name}: freed {device} on devices, {host} of host memory")


def cancel(
    ctx: typer.Context,
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST",
            help="The request's id, as `gpupool top` shows it or as its client saw it: "
            "x-request-id, or the id of the answer.",
        ),
    ],
) -> None:
    """End a live request with an error for its client."""
    with open_client(ctx) as client:
        ended = client.cancel(request_id)
    others = f" and {ended.num_requests - 1} more of its client" if ended.num_requests > 1 else ""
    say(
        f"{ended.request_id}{others}: cancelled after {ended.num_output_tokens} tokens of "
        f"{ended.model}"
    )
