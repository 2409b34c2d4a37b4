"""What the global options chose: which daemon to talk to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import typer

from gpupoold.admin.client import AdminClient
from gpupoold.admin.paths import default_socket_path


@dataclass(frozen=True, slots=True)
class Session:
    """The global options of one run of ``gpupool``."""

    socket_path: Path


def open_client(ctx: typer.Context) -> AdminClient:
    """A client for the daemon that the global options name; use as a context manager."""
    return AdminClient(socket_path_of(ctx))


def socket_path_of(ctx: typer.Context) -> Path:
    """The admin socket that the global options name."""
    session = ctx.find_object(Session)
    return default_socket_path() if session is None else session.socket_path
