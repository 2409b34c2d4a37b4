"""What the global options chose: which daemon to talk to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpupoold.api.client import AdminClient
from gpupoold.api.paths import trusted_socket_path


@dataclass(frozen=True, slots=True)
class Session:
    """The global options of one run of ``gpupool``; no path: where the daemon puts its socket."""

    socket_path: Path | None


def open_client(ctx: typer.Context) -> AdminClient:
    """A client for the daemon that the global options name; use as a context manager."""
    return AdminClient(socket_path_of(ctx))


def socket_path_of(ctx: typer.Context) -> Path:
    """The admin socket that the global options name.

    Raises:
        Refused: they name none, and the folder where it would be is not to be trusted.
    """
    session = ctx.find_object(Session)
    if session is None or session.socket_path is None:
        return trusted_socket_path()
    return session.socket_path


def global_options(
    ctx: typer.Context,
    socket_path: Annotated[
        Path | None,
        typer.Option(
            "--socket",
            metavar="PATH",
            envvar="GPUPOOL_SOCKET",
            help="The daemon's admin socket, if not where the daemon puts it by itself.",
        ),
    ] = None,
) -> None:
    """Keep the global options where the commands find them."""
    ctx.obj = Session(socket_path)
