"""The choice of the daemon by the global options."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from gpupoold.api.client import AdminClient
from gpupoold.api.paths import trusted_socket_path

SOCKET_VARIABLE = "GPUPOOL_SOCKET"


@dataclass(frozen=True, slots=True)
class Session:
    """The global options of one run; no path means the daemon's default socket."""

    socket_path: Path | None


def open_client(ctx: typer.Context) -> AdminClient:
    """Return a client of the chosen daemon; use as a context manager."""
    return AdminClient(socket_path_of(ctx))


def socket_path_of(ctx: typer.Context) -> Path:
    """Return the chosen admin socket.

    Raises:
        Refused: no socket is named, and the default folder cannot be trusted.
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
            envvar=SOCKET_VARIABLE,
            help="The daemon's admin socket; default: the daemon's default path.",
        ),
    ] = None,
) -> None:
    """Store the global options for the commands."""
    ctx.obj = Session(socket_path)
